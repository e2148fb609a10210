// The convolution: consumer warpgroups multiply what the loading warps stage and one warp copies of
// the filter, tile after tile.
#pragma once

#include <cstdint>

#include "conv/taps/sm90/consumer.hpp"
#include "conv/taps/sm90/params.hpp"
#include "conv/taps/sm90/producer.hpp"
#include "conv/taps/sm90/traits.hpp"
#include "cuda/async.hpp"
#include "cute/arch/config.hpp"
#include "cutlass/arch/reg_reconfig.h"

#if defined(__CUDA_ARCH__) && !defined(CUTE_ARCH_MMA_SM90A_ENABLED)
#error "compile the Hopper family for compute capability 9.0a alone"
#endif

namespace fusedconv::conv::taps::sm90 {

template <class Traits>
__global__ void __launch_bounds__(kThreads, 1) convolve(__grid_constant__ Params const p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& barriers = *reinterpret_cast<Barriers*>(shared);
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.stages; ++i) {
      device::init_barrier(&barriers.full_box[i], kLoadWarps);
      device::init_barrier(&barriers.empty_box[i], kConsumers * kWarpgroupWarps);
    }
    for (int i = 0; i < (p.shares_rows ? 1 : kConsumers) * p.slots; ++i) {
      device::init_barrier(&barriers.full_slot[i], 1);
      device::init_barrier(&barriers.empty_slot[i],
                           (p.shares_rows ? kConsumers : 1) * kWarpgroupWarps);
    }
    device::fence_barrier_init();
    device::fence_async_proxy();
  }
  __syncthreads();
  // Uniform, as the compiler sees it too: it would serialise products that might diverge.
  int const role = __reduce_max_sync(~0u, int(threadIdx.x) / kWarpgroupThreads);
  if (role < kConsumers) {
    cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
    consume<Traits>(p, barriers, shared, role);
    return;
  }
  cutlass::arch::warpgroup_reg_dealloc<kLoadRegisters>();
  int const warp = __reduce_max_sync(~0u, int(threadIdx.x) / 32) - kConsumers * kWarpgroupWarps;
  if (warp == kLoadWarps) {
    if (threadIdx.x % 32 == 0) copy_filter<Traits>(p, barriers, device::shared_address(shared));
    return;
  }
  switch (p.loads) {
    case Loads::kPlanes:
      if constexpr (Traits::kElementBytes == 2) {
        stage_inputs<Traits, Loads::kPlanes>(p, barriers, shared, warp);
      }
      break;
    case Loads::kChannels: stage_inputs<Traits, Loads::kChannels>(p, barriers, shared, warp); break;
    case Loads::kElements: stage_inputs<Traits, Loads::kElements>(p, barriers, shared, warp); break;
  }
}

}  // namespace fusedconv::conv::taps::sm90
