// The convolution, its bias, activation and moments: one block per multiprocessor, which takes
// tiles until there are none.
// 1. A thread initialises the barriers and, where it is kept, starts the copy of the filter.
// 2. The warpgroups divide the registers: those that multiply need most.
// 3. One warpgroup gathers input into stages (producer.hpp, staging.hpp): rows that TMA lands in a
//    ring of their own, transposed, or elements that it loads.
// 4. Two warpgroups multiply (consumer.hpp), a tile each in turns or one tile together. Output
//    channels are the instruction's rows, positions its columns: the filter is read less, and a
//    channel's moments lie in four lanes.
// 5. They finish their tiles (epilogue.hpp): bias, activation, moments, and a store in the order in
//    which threads hold the values, which finalize.cu brings into a tensor's.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "conv/sm90/consumer.hpp"
#include "conv/sm90/params.hpp"
#include "conv/sm90/producer.hpp"
#include "conv/sm90/traits.hpp"
#include "cuda/async.hpp"
#include "cute/arch/config.hpp"
#include "cutlass/arch/reg_reconfig.h"

#if defined(__CUDA_ARCH__) && !defined(CUTE_ARCH_MMA_SM90A_ENABLED)
#error "compile the Hopper family for compute capability 9.0a alone"
#endif

namespace fusedconv::conv::sm90 {

// In shared memory follow each other: barriers, filter (kept, or its stages), rows that TMA lands,
// stages of the input.
static_assert(kBarrierBytes % 128 == 0 && kBlockM * kKBlockBytes % 128 == 0,
              "TMA lands at multiples of 128 bytes, and the filter lies before");

template <class Traits>
__global__ void __launch_bounds__(kThreads, 1)
    convolve(__grid_constant__ Params const p, __grid_constant__ CUtensorMap const map) {
  extern __shared__ __align__(1024) unsigned char shared[];
  constexpr bool kKeepsFilter = Traits::kKeepsFilter;
  auto& barriers = *reinterpret_cast<Barriers*>(shared);
  uint32_t const filter_ring = device::shared_address(shared) + kBarrierBytes;
  int const filter_ring_bytes =
      kKeepsFilter ? p.kept_filter_bytes : p.stages * p.filter_stage_bytes;
  unsigned char* const tma_ring = shared + kBarrierBytes + filter_ring_bytes;
  uint32_t const input_ring =
      device::shared_address(tma_ring) + uint32_t(p.tma_stages * p.tma_stage_bytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.stages; ++i) {
      device::init_barrier(&barriers.full[i], kWarpgroupWarps + (kKeepsFilter ? 0 : 1));
      device::init_barrier(&barriers.empty[i], kWarpgroupWarps * (kKeepsFilter ? 1 : kConsumers));
    }
    for (int i = 0; i < p.tma_stages; ++i) {
      device::init_barrier(&barriers.tma_full[i], 1);
      device::init_barrier(&barriers.tma_empty[i], kWarpgroupWarps);
    }
    device::init_barrier(&barriers.filter, 1);
    device::fence_barrier_init();
    device::fence_async_proxy();
  }
  if (kKeepsFilter && threadIdx.x == 0) {
    device::arrive_and_expect(&barriers.filter, p.kept_filter_bytes);
    device::bulk_load(filter_ring, p.filter, p.kept_filter_bytes, &barriers.filter);
  }
  __syncthreads();
  int const warpgroup = threadIdx.x / kWarpgroupThreads;
  if (warpgroup < kConsumers) {
    cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
    consume<Traits>(p, barriers, filter_ring, input_ring, warpgroup);
  } else {
    cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
    int const tma_offset = kBarrierBytes + filter_ring_bytes;
    if (p.tma) {
      produce<Traits, true>(p, barriers, filter_ring, input_ring, map, tma_offset);
    } else {
      produce<Traits, false>(p, barriers, filter_ring, input_ring, map, tma_offset);
    }
  }
}

}  // namespace fusedconv::conv::sm90
