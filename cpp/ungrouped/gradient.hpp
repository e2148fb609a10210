// Gradients of activation, LayerNorm over the channels of each pixel or an affine map of channels,
// activation, or of an activation alone: one pass over the input and the output's gradient, and one
// over what its blocks left.
//
// With a = before(x), xhat = (a - mean) rstd over a pixel's channels (of an affine map xhat = a),
// g = grad_output after'(xhat weight + bias) and means over the pixel's channels:
// grad_a = rstd (weight g - mean(weight g) - xhat mean(weight g xhat)), of an affine map weight g;
// grad_weight = sum(g xhat), grad_bias = sum(g). grad_x = grad_a before'(x) by sums over pixels is
// the gradient of the bias of a convolution in front. Without any activation nothing but these sums
// is to be computed: the input is not read.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fusedconv/groupnorm.hpp"
#include "fusedconv/support.hpp"

namespace fusedconv::ungrouped {

// kIdentity: nothing, and an activation behind at most.
enum class Kind { kLayer, kAffine, kIdentity };

// Sums of a channel: grad_x, g, g xhat; of the identity the first alone.
inline constexpr int kMostSums = 3;
constexpr int sums_of(Kind kind) { return kind == Kind::kIdentity ? 1 : kMostSums; }

// What is computed and in how many parts sums are left, [parts, sums_of(kind), channels] in
// float32: as many on every device.
struct GradientConfig {
  Support support;
  GroupNormProblem problem;  // of the whole batch; groups say nothing
  Kind kind = Kind::kLayer;
  int64_t parts = 0;

  // Whether the gradients depend on the input.
  bool reads_input() const {
    return kind != Kind::kIdentity || problem.activation_after != Activation::kIdentity;
  }
  int64_t partial_bytes() const {
    return parts * sums_of(kind) * problem.channels * int64_t(sizeof(float));
  }
};

GradientConfig gradient_config(GroupNormProblem const& problem, Kind kind);

// input, grad_output and grad_input are dense in the problem's layout and dtype, grad_output in its
// output_dtype: the same, or of LayerNorm float32 beside 16 bits. weight and bias may be null,
// grad_input where sums alone are wanted, input where it is not read.
struct GradientTensors {
  void const* input = nullptr;
  void const* grad_output = nullptr;
  void const* weight = nullptr;
  void const* bias = nullptr;
  void* grad_input = nullptr;
  float* partials = nullptr;
};

void gradient(GradientConfig const& config, GradientTensors const& tensors, cudaStream_t stream);

// [channels] each, or null: weight and bias in the problem's affine_dtype, conv_bias in its dtype.
// Of the identity conv_bias alone.
struct ChannelGradients {
  void* weight = nullptr;
  void* bias = nullptr;
  void* conv_bias = nullptr;
};

// Adds up the parts in a fixed order.
void add_parts(GradientConfig const& config, float const* partials,
               ChannelGradients const& gradients, cudaStream_t stream);

}  // namespace fusedconv::ungrouped
