// Two values of 16 bits in a register.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace fusedconv::device {

// Two of 16 bits as they lie in memory, the first in the low half, by one conversion.
template <class T>
__device__ __forceinline__ uint32_t from_pair(float first, float second) {
  static_assert(sizeof(T) == 2);
  uint32_t result;
  if constexpr (std::is_same_v<T, __half>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(second), "f"(first));
  }
  return result;
}

template <class T>
__device__ __forceinline__ float2 to_pair(uint32_t bits) {
  static_assert(sizeof(T) == 2);
  if constexpr (std::is_same_v<T, __half>) {
    return {__half2float(__ushort_as_half(uint16_t(bits))),
            __half2float(__ushort_as_half(uint16_t(bits >> 16)))};
  } else {
    return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
  }
}

}  // namespace fusedconv::device
