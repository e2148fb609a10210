// Gradients stored line by line, where lines are padded, and summed by channel.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/math.hpp"
#include "groupnorm/gradient.hpp"

namespace fusedconv::groupnorm {

// The lines of a channels-first tensor, in elements. A plane of them has less than 2^31.
struct Lines {
  int columns;
  int pitch;
  int64_t plane;

  // None where the tensor is dense and nothing is summed.
  static Lines of(GroupNormProblem const& p, GradientTensors const& tensors) {
    if (tensors.columns == 0) return {};
    return {tensors.columns, tensors.pitch, p.pixels / tensors.columns * tensors.pitch};
  }
};

// So many pixels further: whole lines, and less than one.
struct LineStep {
  int lines, pixels;

  static LineStep of(GradientTensors const& tensors, int pixels) {
    if (tensors.columns == 0) return {};
    return {pixels / tensors.columns, pixels % tensors.columns};
  }
};

// A walk over the pixels of a plane.
struct LineWalk {
  int column = 0, offset = 0;  // in the line, and in the plane

  LineWalk() = default;
  __device__ __forceinline__ LineWalk(Lines const& lines, int pixel)
      : column(pixel % lines.columns), offset(pixel / lines.columns * lines.pitch + column) {}
  __device__ __forceinline__ void advance(Lines const& lines, LineStep const& step) {
    column += step.pixels;
    offset += step.lines * lines.pitch + step.pixels;
    if (column >= lines.columns) {
      column -= lines.columns;
      offset += lines.pitch - lines.columns;
    }
  }
};

// Calls body with how many elements lie in one line wherever that many neighbours begin at a
// multiple of their number: two or one.
template <class F>
__device__ __forceinline__ void dispatch_piece(Lines const& lines, F&& body) {
  if (lines.columns % 2 == 0) return body(std::integral_constant<int, 2>{});
  body(std::integral_constant<int, 1>{});
}

// Neighbours from where the walk is, whose number is one or even, and which begin at a multiple of
// it.
template <class T, int kCount>
__device__ __forceinline__ void store_in_lines(device::Pack<T, kCount> const& values, T* plane,
                                               LineWalk walk, Lines const& lines) {
  static_assert(kCount == 1 || kCount % 2 == 0);
  dispatch_piece(lines, [&](auto piece) {
    constexpr int kPiece = kCount == 1 ? 1 : decltype(piece)::value;
#pragma unroll
    for (int i = 0; i < kCount; i += kPiece) {
      device::Pack<T, kPiece> part;
#pragma unroll
      for (int e = 0; e < kPiece; ++e) part.values[e] = values.values[i + e];
      part.store(plane + walk.offset);
      walk.advance(lines, {0, kPiece});
    }
  });
}

}  // namespace fusedconv::groupnorm
