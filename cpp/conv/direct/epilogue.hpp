// What becomes of outputs in registers: activation and moments.
#pragma once

#include "conv/direct/params.hpp"
#include "cuda/math.hpp"
#include "fusedconv/activation.hpp"
#include "groupnorm/moments.hpp"

namespace fusedconv::conv::direct {

// Whether each row of the filter is a sum of its own, which an addition joins: one chain over all
// products of a large filter would err by more than the vendor's sums in float32 do.
template <class T>
inline constexpr bool kSumsRows = sizeof(T) == 4;

template <int kRows, int kCount>
__device__ __forceinline__ void clear(float (&values)[kRows][kCount]) {
#pragma unroll
  for (auto& row : values) {
#pragma unroll
    for (float& value : row) value = 0.0f;
  }
}

template <int kRows, int kCount>
__device__ __forceinline__ void add(float (&values)[kRows][kCount],
                                    float const (&others)[kRows][kCount]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int v = 0; v < kCount; ++v) values[i][v] += others[i][v];
  }
}

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

template <class T, int kRows, int kCount>
__device__ __forceinline__ void round_as_stored(float (&values)[kRows][kCount]) {
#pragma unroll
  for (auto& row : values) {
#pragma unroll
    for (float& value : row) value = device::as_stored<T>(value);
  }
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
