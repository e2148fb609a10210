// GroupNorm as a problem: what is normalised, apart from how a kernel does it.
#pragma once

#include <cstdint>

#include "fusedconv/types.hpp"

namespace fusedconv {

// y = act_after((a - mean) * rstd * weight[c] + bias[c]) with a = act_before(x), where mean and the
// biased variance run over one sample and group: channels / groups channels times all pixels, and
// rstd = 1 / sqrt(variance + eps) (Wu and He, 2018, https://arxiv.org/abs/1803.08494).
struct GroupNormProblem {
  int64_t batch = 0;
  int64_t channels = 0;
  int64_t pixels = 0;
  int64_t groups = 1;
  double eps = 1e-5;
  Layout layout = Layout::kChannelsFirst;
  DType dtype = DType::kFloat32;         // of input and output
  DType affine_dtype = DType::kFloat32;  // of weight and bias
  Activation activation_before = Activation::kIdentity;
  Activation activation_after = Activation::kIdentity;

  constexpr int64_t channels_per_group() const { return channels / groups; }
  constexpr int64_t group_size() const { return channels_per_group() * pixels; }
};

// Dense tensors. weight, bias, mean and rstd may be null; mean and rstd are [batch, groups].
struct GroupNormTensors {
  void const* input = nullptr;
  void* output = nullptr;
  void const* weight = nullptr;
  void const* bias = nullptr;
  float* mean = nullptr;
  float* rstd = nullptr;
};

}  // namespace fusedconv
