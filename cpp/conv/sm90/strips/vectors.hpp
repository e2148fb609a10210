// Accesses to shared memory by its addresses there.
#pragma once

#include <cstdint>

namespace fusedconv::conv::sm90::strips {

__device__ __forceinline__ uint4 load_vector(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address));
  return v;
}

__device__ __forceinline__ void store_vector(uint32_t address, uint4 const& v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

}  // namespace fusedconv::conv::sm90::strips
