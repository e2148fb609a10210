// Transposed convolutions of few channels a group, depthwise ones above all, and their gradients,
// for processors: sums of shifted lines in float32 vectors.
#pragma once

#include <cstdint>

#include "conv/transposed.hpp"
#include "fusedconv/types.hpp"

namespace fusedconv::cpu {

// Along the last axis, whose phases are lines of their own.
inline constexpr int kMostColumnStride = 64;

// Dense tensors: input [N, C, D, H, W], output [N, K, Z, P, Q] and their gradients, of one dtype;
// weight and its gradient [C, K / groups, T, R, S] and bias [K], in float32. A pass leaves those
// null that it has nothing to do with; a bias may be absent.
struct DirectTensors {
  void const* input = nullptr;
  float const* weight = nullptr;
  float const* bias = nullptr;
  void* output = nullptr;
  void const* grad_output = nullptr;
  void* grad_input = nullptr;
  float* grad_weight = nullptr;
};

// problem.layout is channels first. The number of threads changes no bit of what they compute.
void direct_convolution(conv::TransposedProblem const& problem, DType dtype, int64_t batch,
                        DirectTensors const& tensors, int threads);
void direct_input_gradient(conv::TransposedProblem const& problem, DType dtype, int64_t batch,
                           DirectTensors const& tensors, int threads);
void direct_weight_gradient(conv::TransposedProblem const& problem, DType dtype, int64_t batch,
                            DirectTensors const& tensors, int threads);

}  // namespace fusedconv::cpu
