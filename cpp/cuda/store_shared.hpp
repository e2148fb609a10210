// Stores to shared memory by the address there.
#pragma once

#include <vector_types.h>

#include <cstdint>

namespace fusedconv::device {

__device__ __forceinline__ void store_shared(uint32_t address, uint16_t value) {
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(address), "h"(value) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, uint2 value) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(value.x), "r"(value.y)
               : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, float first, float second) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(first), "f"(second)
               : "memory");
}

}  // namespace fusedconv::device
