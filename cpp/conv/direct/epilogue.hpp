// What becomes of outputs in registers: activation and moments.
#pragma once

#include "conv/direct/params.hpp"
#include "cuda/math.hpp"
#include "fusedconv/activation.hpp"
#include "groupnorm/moments.hpp"

namespace fusedconv::conv::direct {

// Quick forms where the result is rounded to 16 bits.
template <class T, int kRows, int kCount>
__device__ __forceinline__ void activate(Activation activation, float (&values)[kRows][kCount]) {
  if (activation == Activation::kIdentity) return;
  dispatch_activation(activation, [&](auto a) {
    using A = decltype(a);
#pragma unroll
    for (auto& row : values) {
#pragma unroll
      for (float& value : row) {
        value = sizeof(T) == 2 ? device::quick_value<A>(value) : A::value(value);
      }
    }
  });
}

// Of the first `count` values, about the first that comes.
template <int kCount>
__device__ __forceinline__ void add(device::ShiftedMoments& moments, int& total,
                                    float const (&values)[kCount], int count) {
  if (total == 0) moments.shift = values[0];
  total += count;
#pragma unroll
  for (int v = 0; v < kCount; ++v) {
    if (v < count) moments.add(values[v]);
  }
}

}  // namespace fusedconv::conv::direct
