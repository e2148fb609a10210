// The weight gradient: a warpgroup for each of the filter's columns, or of a task's groups of
// output channels, and a producer, behind one ring of stages; in strict fp32 the producer's other
// warps split what it brings.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "conv/sm90/wgrad/consumer.hpp"
#include "conv/sm90/wgrad/params.hpp"
#include "conv/sm90/wgrad/producer.hpp"
#include "conv/sm90/wgrad/split_consumer.hpp"
#include "conv/sm90/wgrad/traits.hpp"
#include "cuda/async.hpp"
#include "cute/arch/config.hpp"
#include "cutlass/arch/reg_reconfig.h"

#if defined(__CUDA_ARCH__) && !defined(CUTE_ARCH_MMA_SM90A_ENABLED)
#error "compile the Hopper family for compute capability 9.0a alone"
#endif

namespace fusedconv::conv::sm90::wgrad {

template <class Traits>
__global__ void __launch_bounds__(kMostThreads, 1)
    sum_products(__grid_constant__ Params const p, __grid_constant__ CUtensorMap const input_map,
                 __grid_constant__ CUtensorMap const grad_map) {
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& barriers = *reinterpret_cast<Barriers*>(shared);
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.stages; ++i) {
      device::init_barrier(&barriers.full[i], 1);
      device::init_barrier(&barriers.split[i], kSplitterWarps);
      device::init_barrier(&barriers.empty[i], kWarpgroupWarps * p.warpgroups());
    }
    device::fence_barrier_init();
    device::fence_async_proxy();
  }
  __syncthreads();
  BlockWork const work(p);
  int const warpgroup = __reduce_max_sync(~0u, threadIdx.x / kWarpgroupThreads);
  if (warpgroup < p.warpgroups()) {
    cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
    auto const memory = Memory::of<Traits>(p, device::shared_address(shared));
    if constexpr (Traits::kSplits) {
      consume_split<Traits>(p, barriers, memory, work, warpgroup);
    } else {
      if constexpr (Traits::kElementBytes == 2) {
        if (p.groups == 1 && (warpgroup - p.pad_w) % 2 != 0) {
          consume<Traits, true>(p, barriers, memory, work, warpgroup);
          return;
        }
      }
      consume<Traits, false>(p, barriers, memory, work, warpgroup);
    }
  } else {
    cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
    int const thread = int(threadIdx.x) % kWarpgroupThreads;
    if (thread == 0) produce<Traits>(p, barriers, shared, work, input_map, grad_map);
    if constexpr (Traits::kSplits) {
      if (thread >= 32) split_lines<Traits>(p, barriers, shared, work, thread - 32);
    }
  }
}

}  // namespace fusedconv::conv::sm90::wgrad
