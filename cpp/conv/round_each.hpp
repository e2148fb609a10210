// Rounding of values in registers as a tensor's type stores them.
#pragma once

#include "cuda/math.hpp"
#include "cuda/pair.hpp"

namespace fusedconv::conv {

// Two of 16 bits by one conversion: those of single values go through the unit of special
// functions.
template <class T, int kCount>
__device__ __forceinline__ void round_each(float (&values)[kCount]) {
  if constexpr (sizeof(T) == 2) {
    static_assert(kCount % 2 == 0);
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      float2 const rounded = device::to_pair<T>(device::from_pair<T>(values[i], values[i + 1]));
      values[i] = rounded.x;
      values[i + 1] = rounded.y;
    }
  }
}

}  // namespace fusedconv::conv
