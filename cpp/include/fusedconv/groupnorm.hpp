// GroupNorm as a problem: what is normalised, apart from how a kernel does it.
#pragma once

#include <cstdint>

#include "fusedconv/activation.hpp"
#include "fusedconv/types.hpp"

namespace fusedconv {

// y = act_after((a - mean) * rstd * weight[c] + bias[c]) with a = act_before(x), where mean and the
// biased variance run over one sample and group: channels / groups channels times all pixels, and
// rstd = 1 / sqrt(variance + eps) (Wu and He, 2018, https://arxiv.org/abs/1803.08494). groups and
// eps say nothing to a pass that only activates and changes layout or dtype.
struct GroupNormProblem {
  int64_t batch = 0;
  int64_t channels = 0;
  int64_t pixels = 0;
  int64_t groups = 1;
  double eps = 0.0;
  Layout input_layout = Layout::kChannelsFirst;
  Layout output_layout = Layout::kChannelsFirst;
  DType dtype = DType::kFloat32;  // of the input
  DType output_dtype = DType::kFloat32;
  DType affine_dtype = DType::kFloat32;  // of weight and bias
  Activation activation_before = Activation::kIdentity;
  Activation activation_after = Activation::kIdentity;
  int64_t row_channels = 0;  // of a channels-last input, with padding channels; 0: channels
  bool tf32 = false;         // float32 values that go through products in TF32

  constexpr int64_t channels_per_group() const { return channels / groups; }
  constexpr int64_t group_size() const { return channels_per_group() * pixels; }
  // Whether activations may be off by what their operands' rounding costs.
  constexpr bool quick() const { return tf32 || dtype != DType::kFloat32; }
  constexpr int64_t input_row_channels() const {
    return row_channels > 0 ? row_channels : channels;
  }
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
