// Transposed convolutions whose filter is as large as their stride, for processors: each input
// pixel has a tile of the output to itself, so that they are one matrix product, whose blocks go
// from cache to their places (a pixel shuffle; Shi et al., 2016).
#pragma once

#include <cstdint>
#include <span>

#include "conv/transposed.hpp"
#include "fusedconv/activation.hpp"
#include "fusedconv/types.hpp"

namespace fusedconv::cpu {

// Dense tensors in the problem's layout: input [N, C, D, H, W] and output [N, K, Z, P, Q] of one
// dtype; weight [C, K, T, R, S] of any strides, and bias [K], which may be absent, in float32.
struct PixelShuffleTensors {
  void const* input = nullptr;
  float const* weight = nullptr;
  std::span<int64_t const> weight_strides;
  float const* bias = nullptr;
  void* output = nullptr;
};

// One group, without padding and dilation. The number of threads changes no bit of the output.
void pixel_shuffle(conv::TransposedProblem const& problem, DType dtype, int64_t batch,
                   Activation activation, PixelShuffleTensors const& tensors, int threads);

}  // namespace fusedconv::cpu
