// Gradients of depthwise transposed convolutions, whose groups have one channel: with
// o = stride i + dilation k - padding along each axis, grad_input[i] = sum over k of
// weight[k] grad[o] and grad_weight[k] = sum over samples and i of input[i] grad[o]. What a thread
// loads of the output's gradient serves both; memory is the limit.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "conv/transposed.hpp"
#include "fusedconv/support.hpp"
#include "fusedconv/types.hpp"

namespace fusedconv::conv::direct {

// What is computed, and how it is cut: a block has `run` positions of a sample's input (channels
// last of a slab of channels), and leaves a part of the weight's gradient.
struct GradientConfig {
  Support support;
  TransposedProblem problem;
  DType dtype = DType::kFloat32;
  int64_t batch = 0;
  int taps = 0;
  bool known = false;  // a kernel was compiled for the filter; else each gradient has a pass
  int runs = 0;        // of a sample
  int run = 0;

  int64_t parts() const { return batch * runs; }
  // [parts, groups, taps] in float32.
  int64_t partial_bytes() const { return parts() * problem.groups * taps * int64_t(sizeof(float)); }
};

GradientConfig gradient_config(TransposedProblem const& problem, DType dtype, int64_t batch);

// input, grad_output and grad_input are dense in the problem's layout, weight as `source` has it.
// grad_input is null where it is not wanted, or partials are.
struct GradientTensors {
  void const* input = nullptr;
  void const* grad_output = nullptr;
  void const* weight = nullptr;
  void* grad_input = nullptr;
  float* partials = nullptr;
};

void depthwise_gradients(GradientConfig const& config, FilterSource const& source,
                         GradientTensors const& tensors, cudaStream_t stream);

// Adds up the parts in a fixed order: grad_weight is [groups, taps] of dtype.
void add_weight_parts(GradientConfig const& config, float const* partials, void* grad_weight,
                      cudaStream_t stream);

}  // namespace fusedconv::conv::direct
