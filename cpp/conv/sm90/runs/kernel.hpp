// The convolution with positions from registers: consumer warpgroups with tiles of their own.
// Each has a ring and a producer warp; where the filter passes through the stages, all share one.
// While one is in its epilogue the others multiply, without taking turns.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "conv/sm90/runs/consumer.hpp"
#include "conv/sm90/runs/params.hpp"
#include "conv/sm90/runs/producer.hpp"
#include "conv/sm90/runs/traits.hpp"
#include "cuda/async.hpp"
#include "cuda/math.hpp"
#include "cute/arch/config.hpp"
#include "cutlass/arch/reg_reconfig.h"

#if defined(__CUDA_ARCH__) && !defined(CUTE_ARCH_MMA_SM90A_ENABLED)
#error "compile the Hopper family for compute capability 9.0a alone"
#endif

namespace fusedconv::conv::sm90::runs {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    convolve(__grid_constant__ Params const p, __grid_constant__ CUtensorMap const first,
             __grid_constant__ CUtensorMap const last) {
  using T = typename Traits::Element;
  constexpr int kConsumers = Traits::kConsumers;
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& header = *reinterpret_cast<Header*>(shared);
  Barriers& barriers = header.barriers;
  Block<Traits::kOwnTaps> const block(p);
  uint32_t const start = device::shared_address(shared);
  if (threadIdx.x == 0) {
    int const readers = kWarpgroupWarps * (p.streams_filter ? kConsumers : 1);
    for (int ring = 0; ring < (p.streams_filter ? 1 : kConsumers); ++ring) {
      for (int i = 0; i < p.stages; ++i) {
        device::init_barrier(&barriers.full[ring][i], 1);
        device::init_barrier(&barriers.empty[ring][i], readers);
      }
    }
    device::init_barrier(&barriers.filter, 1);
    device::fence_barrier_init();
    device::fence_async_proxy();
  }
  if (threadIdx.x == 0 && !p.streams_filter) {
    int const bytes = block.k_iterations() * block.filter_stage_bytes();
    int64_t const before = int64_t(block.number) * p.k_iterations * p.filter_stage_bytes;
    device::arrive_and_expect(&barriers.filter, bytes);
    device::bulk_load(start + kHeaderBytes, p.filter + before, bytes, &barriers.filter);
  }
  if (threadIdx.x < kBlockN) {
    int channel = block.channel0 + int(threadIdx.x);
    if constexpr (Traits::kOwnTaps) {
      channel = block.channel0 + p.phase_blocks.column(int(threadIdx.x)).channel;
    } else if constexpr (Traits::kInterleaves) {
      channel = p.phases.div(channel);
    }
    header.bias[threadIdx.x] = p.bias != nullptr && channel < p.tensor_channels
                                   ? device::to_float(static_cast<T const*>(p.bias)[channel])
                                   : 0.0f;
  }
  __syncthreads();
  int const warpgroup = __reduce_max_sync(~0u, threadIdx.x / kWarpgroupThreads);
  if (warpgroup < kConsumers) {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    auto* const moments = reinterpret_cast<float*>(shared + Memory::moments(p));
    consume<Traits>(p, header, Memory(p, start, warpgroup),
                    moments + warpgroup * kWarpgroupWarps * kMomentFloats, warpgroup, block);
  } else {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    int const ring = threadIdx.x % kWarpgroupThreads / 32;
    if (threadIdx.x % 32 != 0) return;
    Maps const maps{&first, &last};
    if (p.streams_filter) {
      if (ring == 0) {
        produce<Traits, kConsumers>(p, barriers, Memory(p, start, 0), shared, 0, block, maps);
      }
    } else if (ring < kConsumers) {
      produce<Traits, 1>(p, barriers, Memory(p, start, ring), shared, ring, block, maps);
    }
  }
}

}  // namespace fusedconv::conv::sm90::runs
