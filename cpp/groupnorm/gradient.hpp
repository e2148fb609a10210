// Gradients of activation, GroupNorm, activation: the sums that the gradient of a whole group
// needs, then the gradient of each element.
//
// With a = before(x), xhat = (a - mean) rstd, g = grad_output after'(xhat weight + bias) and means
// over the group: grad_a = rstd (weight g - mean(weight g) - xhat mean(weight g xhat)), grad_weight
// = sum(g xhat), grad_bias = sum(g). In two passes over the input and the gradient:
//   1. gradient_sums(): each block's share of its channels' sums of g and g xhat.
//   2. merge_gradient_sums(): a channel's partial sums add up in a fixed order, and a group's
//      channels, weighted, to the group's terms.
//   3. input_gradient(): each element's gradient, from its group's terms.
//   4. affine_gradients(): a channel's sums over all samples.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fusedconv/groupnorm.hpp"
#include "fusedconv/support.hpp"

namespace fusedconv::groupnorm {

// input, grad_output and grad_input are dense in the problem's layout and dtype, grad_output in its
// output_dtype: the same, or float32 beside 16 bits. mean and rstd are the forward pass's [batch,
// groups]. weight and bias may be null; bias matters only behind an activation. grad_input may lie
// in planes of lines of so many columns, which begin at multiples of pitch, whole 16 bytes unless
// that is as many; pixels are whole lines, addresses multiples of 16 bytes. Channels first what
// lies between a plane's lines may be written, what follows its last one is not. Its sums by
// channel are then left in parts, [batch, channels, GradientBuffers::channel_sums], unless sums is
// null; channels last too, where gradients are not streamed.
struct GradientTensors {
  void const* input = nullptr;
  void const* grad_output = nullptr;
  float const* mean = nullptr;
  float const* rstd = nullptr;
  void const* weight = nullptr;
  void const* bias = nullptr;
  void* grad_input = nullptr;
  int columns = 0;  // 0: dense
  int pitch = 0;
  float* sums = nullptr;
};

// sum(g) and sum(g xhat).
using GradientSum = float2;

// mean(weight g) and mean(weight g xhat) of a group.
struct GroupTerms {
  float gradient;
  float projection;
};

// What the steps leave for each other: partial sums, [sample, channel, partial] or, channels last,
// [sample, partial, channel]; their totals, [sample, channel]; the terms, [sample, group].
struct GradientBuffers {
  Support support;
  int partials = 0;      // of a channel of a sample
  int channel_sums = 0;  // parts of a channel of a sample in the sums of the input's gradient
  int64_t partial_bytes = 0;
  int64_t sum_bytes = 0;
  int64_t term_bytes = 0;

  void set_sizes(GroupNormProblem const& p, int partials_per_channel) {
    partials = partials_per_channel;
    sum_bytes = p.batch * p.channels * int64_t(sizeof(GradientSum));
    partial_bytes = sum_bytes * partials;
    term_bytes = p.batch * p.groups * int64_t(sizeof(GroupTerms));
  }
};

// Of two passes over the input and the gradient: sums, then the input's gradient.
struct GradientConfig : GradientBuffers {};

// in_lines: grad_input lies in lines.
GradientConfig gradient_sums_config(GroupNormProblem const& problem, bool in_lines);

// Fills the partial sums.
void gradient_sums(GroupNormProblem const& problem, GradientTensors const& tensors,
                   GradientSum* partials, cudaStream_t stream);

// Fills the totals and the terms.
void merge_gradient_sums(GradientBuffers const& buffers, GroupNormProblem const& problem,
                         void const* weight, GradientSum const* partials, GradientSum* sums,
                         GroupTerms* terms, cudaStream_t stream);

// Fills tensors.grad_input.
void input_gradient(GroupNormProblem const& problem, GradientTensors const& tensors,
                    GroupTerms const* terms, cudaStream_t stream);

// Totals of a channel, [channels] each; any may be null. conv_bias is the sum of sums, which
// input_gradient() or streamed_gradients() has left in so many parts.
struct AffineTargets {
  void* weight = nullptr;
  void* bias = nullptr;
  DType dtype = DType::kFloat32;  // of both
  float const* sums = nullptr;
  int parts = 0;
  void* conv_bias = nullptr;
  DType conv_dtype = DType::kFloat32;
};

// Fills the targets.
void affine_gradients(GroupNormProblem const& problem, GradientSum const* sums,
                      AffineTargets const& targets, cudaStream_t stream);

}  // namespace fusedconv::groupnorm
