// The moments that a thread takes of its values, before threads merge theirs.
#pragma once

#include <type_traits>

#include "groupnorm/moments.hpp"

namespace fusedconv::groupnorm {

// Of values of 16 bits, whose own spacing is hundreds of roundings of a float mean: one float holds
// it.
struct NarrowMoments : device::RelativeMoments {
  template <int kCount>
  __device__ __forceinline__ void add(float const (&values)[kCount]) {
    add(values, device::Moments::weight_of(count, float(kCount)));
  }
  // With weight_of() the counts, where several share it. Two passes over the registers.
  template <int kCount>
  __device__ __forceinline__ void add(float const (&values)[kCount], float weight) {
    // Chains begin with their first value: adding that to zero is an operation for each.
    float sums[4] = {}, squares[4] = {};
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i % 4] = i < 4 ? values[i] : sums[i % 4] + values[i];
    float const mean = ((sums[0] + sums[1]) + (sums[2] + sums[3])) * (1.0f / kCount);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float const deviation = values[i] - mean;
      squares[i % 4] = i < 4 ? deviation * deviation : fmaf(deviation, deviation, squares[i % 4]);
    }
    float const own = (squares[0] + squares[1]) + (squares[2] + squares[3]);
    float const delta = mean - offset;
    m2 += fmaf(delta * delta, count * weight, own);
    offset = fmaf(delta, weight, offset);
    count += float(kCount);
  }
  // Deviations are taken from the values' own mean: the reference is 0, whatever value is offered.
  __device__ __forceinline__ static float reference(float) { return 0.0f; }
  __device__ __forceinline__ void start(float) {}
  __device__ __forceinline__ device::RelativeMoments relative() const { return *this; }
  __device__ __forceinline__ device::Moments whole() const {
    return device::Moments::of(0.0f, *this);
  }
};

struct WideMoments : device::Moments {
  // Before the first values, where add() gets a weight, with one of them, or of those that other
  // threads add: theirs then merge as they are.
  __device__ __forceinline__ static float reference(float value) { return value; }
  __device__ __forceinline__ void start(float value) { mean = value; }
  __device__ __forceinline__ device::RelativeMoments relative() const { return {count, low, m2}; }
  __device__ __forceinline__ device::Moments whole() const { return *this; }
};

template <class T>
using RunningMoments = std::conditional_t<sizeof(T) == 2, NarrowMoments, WideMoments>;

}  // namespace fusedconv::groupnorm
