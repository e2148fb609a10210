// The convolution with positions from registers: three consumer warpgroups, each with tiles of its
// own, and a producer warp for each. While one is in its epilogue the others multiply, without
// taking turns.
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

// In shared memory follow each other: header, filter, the consumers' rings, their moments. The
// tensor maps' boxes are those of wide and of narrow tiles.
template <class Traits>
__global__ void __launch_bounds__(kThreads, 1)
    convolve(__grid_constant__ Params const p, __grid_constant__ CUtensorMap const wide,
             __grid_constant__ CUtensorMap const narrow) {
  using T = typename Traits::Element;
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& header = *reinterpret_cast<Header*>(shared);
  Barriers& barriers = header.barriers;
  unsigned char* const filter = shared + kHeaderBytes;
  unsigned char* const rings = filter + p.block_filter_bytes;
  int const ring_bytes = p.stages * p.stage_bytes;
  float* const moments = reinterpret_cast<float*>(rings + kConsumers * ring_bytes);
  int block_n, ignored;
  p.blocks_n(ignored, block_n, int(blockIdx.x));
  int const channel0 = block_n * kBlockN;
  if (threadIdx.x == 0) {
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      for (int i = 0; i < p.stages; ++i) {
        device::init_barrier(&barriers.full[consumer][i], 1);
        device::init_barrier(&barriers.empty[consumer][i], kWarpgroupWarps);
      }
    }
    device::init_barrier(&barriers.filter, 1);
    device::fence_barrier_init();
    device::fence_async_proxy();
    device::arrive_and_expect(&barriers.filter, p.block_filter_bytes);
    device::bulk_load(device::shared_address(filter),
                      p.filter + int64_t(block_n) * p.block_filter_bytes, p.block_filter_bytes,
                      &barriers.filter);
  }
  if (threadIdx.x < kBlockN) {
    int const channel = channel0 + int(threadIdx.x);
    header.bias[threadIdx.x] = p.bias != nullptr && channel < p.out_channels
                                   ? device::to_float(static_cast<T const*>(p.bias)[channel])
                                   : 0.0f;
  }
  __syncthreads();
  int const warpgroup = __reduce_max_sync(~0u, threadIdx.x / kWarpgroupThreads);
  if (warpgroup < kConsumers) {
    cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
    consume<Traits>(p, header, device::shared_address(filter),
                    device::shared_address(rings) + warpgroup * ring_bytes,
                    moments + warpgroup * kWarpgroupWarps * kMomentFloats, warpgroup, channel0);
  } else {
    cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
    int const consumer = threadIdx.x % kWarpgroupThreads / 32;
    if (consumer < kConsumers && threadIdx.x % 32 == 0) {
      produce<Traits>(p, barriers, rings + consumer * ring_bytes, consumer, block_n, wide, narrow);
    }
  }
}

}  // namespace fusedconv::conv::sm90::runs
