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
__device__ __forceinline__ void store_shared(uint32_t address, uint4 value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, float first, float second) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(first), "f"(second)
               : "memory");
}

// Four matrices of eight by eight elements of 16 bits, transposed: a lane's word of each is of row
// lane / 4, and lanes 8 i to 8 i + 7 have the addresses of the i-th's columns. Of compute
// capability 9.0 and later.
__device__ __forceinline__ void store_matrices_transposed([[maybe_unused]] uint32_t address,
                                                          [[maybe_unused]] uint4 const& matrices) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(matrices.x), "r"(matrices.y), "r"(matrices.z), "r"(matrices.w)
      : "memory");
#endif
}

}  // namespace fusedconv::device
