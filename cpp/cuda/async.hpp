// What asynchronous kernels of compute capability 9.0 are made of: mbarriers, bulk copies between
// global and shared memory, fences between the two kinds of access, named barriers, and a ring's
// cursor. Pointers to barriers point to shared memory.
#pragma once

#include <cstdint>

// Helpers that a kernel's unit does not use, or that are empty for older devices.
#pragma nv_diag_suppress 177

namespace fusedconv::device {

__device__ __forceinline__ uint32_t shared_address(void const* pointer) {
  return uint32_t(__cvta_generic_to_shared(pointer));
}

// Of shared memory, by its address there.
__device__ __forceinline__ uint32_t load_word(uint32_t address) {
  uint32_t result;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(result) : "r"(address));
  return result;
}

__device__ __forceinline__ uint4 load_vector(uint32_t address) {
  uint4 result;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(result.x), "=r"(result.y), "=r"(result.z), "=r"(result.w)
               : "r"(address));
  return result;
}

__device__ __forceinline__ float4 load_quad(uint32_t address) {
  float4 result;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(result.x), "=f"(result.y), "=f"(result.z), "=f"(result.w)
               : "r"(address));
  return result;
}

// Four matrices of eight rows of 16 bytes each, from what the instructions of tensor cores leave in
// lanes' registers. Lanes 8 i to 8 i + 7 have the addresses of the i-th's rows.
__device__ __forceinline__ void store_matrices([[maybe_unused]] uint32_t address,
                                               [[maybe_unused]] uint4 const& matrices) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(matrices.x), "r"(matrices.y), "r"(matrices.z), "r"(matrices.w)
               : "memory");
#endif
}

// ---- mbarriers ----

__device__ __forceinline__ void init_barrier(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}

// Makes initialised barriers visible to what arrives at them from outside the thread.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// Arrives, and lets the phase end only after copies of so many bytes have landed.
__device__ __forceinline__ void arrive_and_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

// Whether the phase of this parity has ended.
__device__ __forceinline__ bool has_ended(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

// Until it has.
__device__ __forceinline__ void wait(uint64_t* barrier, uint32_t parity) {
  while (!has_ended(barrier, parity)) {
  }
}

// ---- bulk copies ----

// Addresses and sizes are multiples of 16 bytes. Bulk copies go past the load-store unit: when DRAM
// is the limit, they do not hold up the threads' own accesses to shared memory, as copies by the
// threads would.
__device__ __forceinline__ void bulk_load(uint32_t target, void const* source, uint32_t bytes,
                                          uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(target),
      "l"(source), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// Makes one group of the thread's stores since the last.
__device__ __forceinline__ void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

__device__ __forceinline__ void bulk_store(void* target, uint32_t source, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target),
               "r"(source), "r"(bytes)
               : "memory");
  commit_stores();
}

// Until all but the latest kPending groups of the thread's stores have read their shared memory.
template <int kPending = 0>
__device__ __forceinline__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void bulk_prefetch(void const* source, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes) : "memory");
}

// Orders the thread's accesses to shared memory before those of bulk copies and tensor cores that
// follow.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- named barriers ----

// Of `threads` threads of the block, whole warps, which meet at barrier `index`, 1 to 15.
__device__ __forceinline__ void sync_threads(int index, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(index), "r"(threads) : "memory");
}

// Counts as one of those threads, without waiting for the others.
__device__ __forceinline__ void arrive_threads(int index, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(index), "r"(threads) : "memory");
}

// ---- rings ----

// A stage of a ring, and the parity of its current use.
struct RingCursor {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ void skip(int count, int stages) {
    for (int i = 0; i < count; ++i) advance(stages);
  }
  // Of so many that divide the stages, from a stage that is a multiple of them on.
  __device__ __forceinline__ void step(int count, int stages) {
    if ((stage += count) >= stages) {
      stage -= stages;
      parity ^= 1;
    }
  }
  // As skip(), by a division.
  __device__ __forceinline__ void jump(int count, int stages) {
    int const uses = (stage + count) / stages;
    stage += count - uses * stages;
    parity ^= uses & 1;
  }
};

}  // namespace fusedconv::device
