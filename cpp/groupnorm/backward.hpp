// Gradients of activation, GroupNorm, activation in two passes over the input and the gradient.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fusedconv/groupnorm.hpp"

namespace fusedconv::groupnorm {

// input, grad_output and grad_input are dense in the problem's layout and dtype; mean and rstd are
// the forward pass's [batch, groups]; grad_weight and grad_bias are float [channels]. weight, bias,
// grad_weight and grad_bias may be null; bias matters only behind an activation.
struct GradientTensors {
  void const* input = nullptr;
  void const* grad_output = nullptr;
  float const* mean = nullptr;
  float const* rstd = nullptr;
  void const* weight = nullptr;
  void const* bias = nullptr;
  void* grad_input = nullptr;
  float* grad_weight = nullptr;
  float* grad_bias = nullptr;
};

int64_t gradient_workspace_bytes(GroupNormProblem const& problem);

// With a = before(x), xhat = (a - mean) rstd, g = grad_output after'(xhat weight + bias) and means
// over the group: grad_a = rstd (weight g - mean(weight g) - xhat mean(weight g xhat)), grad_weight
// = sum(g xhat), grad_bias = sum(g). Deterministic: sums are merged in a fixed order.
void gradients(GroupNormProblem const& problem, GradientTensors const& tensors, void* workspace,
               cudaStream_t stream);

}  // namespace fusedconv::groupnorm
