// Blocks of a cluster, of compute capability 9.0: their barrier, and each other's shared memory.
#pragma once

#include <vector_types.h>

#include <cstdint>

namespace fusedconv::device {

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t result;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(result));
  return result;
}

// The two halves of the cluster's barrier, for what a thread has to do between them.
__device__ __forceinline__ void arrive_cluster() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
__device__ __forceinline__ void wait_cluster() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// Until all threads of the cluster have come here or ended. What they wrote before is seen behind.
__device__ __forceinline__ void sync_cluster() {
  arrive_cluster();
  wait_cluster();
}

// The same where what threads wrote before is of their own shared memory alone: the general form
// waits for all of the thread's accesses to global memory, half a microsecond or more. For whole
// warps, as __syncthreads() is.
__device__ __forceinline__ void arrive_cluster_shared() {
#if __CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 8)
  asm volatile(
      "fence.release.sync_restrict::shared::cta.cluster;\n"
      "barrier.cluster.arrive.relaxed.aligned;" ::
          : "memory");
#else
  arrive_cluster();
#endif
}

// For those that have only read each other's shared memory, before it goes.
__device__ __forceinline__ void arrive_cluster_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}

// From the shared memory of the cluster's block `rank`, where the address is the executing one's.
__device__ __forceinline__ float4 load_of_cluster(uint32_t address, uint32_t rank) {
  float4 result;
  asm volatile(
      "{\n"
      ".reg .b32 a;\n"
      "mapa.shared::cluster.u32 a, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [a];\n"
      "}"
      : "=f"(result.x), "=f"(result.y), "=f"(result.z), "=f"(result.w)
      : "r"(address), "r"(rank)
      : "memory");
  return result;
}

__device__ __forceinline__ float load_float_of_cluster(uint32_t address, uint32_t rank) {
  float result;
  asm volatile(
      "{\n"
      ".reg .b32 a;\n"
      "mapa.shared::cluster.u32 a, %1, %2;\n"
      "ld.shared::cluster.f32 %0, [a];\n"
      "}"
      : "=f"(result)
      : "r"(address), "r"(rank)
      : "memory");
  return result;
}

}  // namespace fusedconv::device
