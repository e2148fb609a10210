// The convolution whose filter stays in registers, by blocks that go down strips.
#pragma once

#include <cstdint>
#include <utility>

#include "conv/sm90/strips/copies.hpp"
#include "conv/sm90/strips/outputs.hpp"
#include "conv/sm90/strips/params.hpp"
#include "conv/sm90/strips/traits.hpp"
#include "conv/sm90/wait.hpp"
#include "conv/sm90/wgmma.hpp"
#include "cuda/async.hpp"
#include "cute/arch/cluster_sm90.hpp"
#include "cute/arch/config.hpp"
#include "cutlass/arch/reg_reconfig.h"

#if defined(__CUDA_ARCH__) && !defined(CUTE_ARCH_MMA_SM90A_ENABLED)
#error "compile the Hopper family for compute capability 9.0a alone"
#endif

namespace fusedconv::conv::sm90::strips {

// A line's channels of neighbouring positions, by a swizzle's eight channels. Addresses are counted
// by 16 bytes.
__device__ __forceinline__ uint64_t lines_operand(uint32_t shared) {
  constexpr uint64_t kSwizzle = 1;  // of 128 bytes
  return kSwizzle << 62 | uint64_t(8 * kPitch >> 4) << 32 | shared >> 4;
}

// A warpgroup that multiplies.
template <class Traits>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(Params const& p, Block const& block, Barriers& barriers,
                                      uint32_t shared)
      : barriers_(barriers), ring_(lines_operand(shared)) {
    uint4 const* const filter =
        p.filter + int64_t(block.channel0 / kChannels) * kProducts * kWarpgroupThreads +
        threadIdx.x % kWarpgroupThreads;
#pragma unroll
    for (int i = 0; i < kProducts; ++i) {
      uint4 const v = filter[i * kWarpgroupThreads];
      filter_[i][0] = v.x, filter_[i][1] = v.y, filter_[i][2] = v.z, filter_[i][3] = v.w;
    }
  }

  // Of the block's n-th line of input and the two behind it, the first two of which it releases.
  __device__ __forceinline__ void multiply(uint32_t n, float (&sums)[kSums]) {
    using Indices = std::make_integer_sequence<int, kSums>;
    using cute::SM90::GMMA::ScaleOut;
#pragma unroll
    for (float& sum : sums) cute::warpgroup_fence_operand(sum);
#pragma unroll
    for (int r = 0; r < kTaps; ++r) {
      Slot const slot(n + r);
      wait_for(&barriers_.copied[slot.stage], slot.parity);
      cute::warpgroup_arrive();
      uint64_t const line = ring_ + slot.stage * (kLineBytes >> 4);
#pragma unroll
      for (int i = 0; i < kTaps * kSteps; ++i) {
        int const at = i / kSteps * kCopyBytes + i % kSteps * kStepChannels * kPitch;
        sm90::multiply<typename Traits::Mma>(filter_[r * kTaps * kSteps + i], line + (at >> 4),
                                             sums, r + i > 0 ? ScaleOut::One : ScaleOut::Zero,
                                             Indices{});
      }
      cute::warpgroup_commit_batch();
      if (r > 0) {
        cute::warpgroup_wait<1>();
        release(n + r - 1);
      }
    }
    cute::warpgroup_wait<0>();
#pragma unroll
    for (float& sum : sums) cute::warpgroup_fence_operand(sum);
  }

  // Of lines that this consumer does not multiply, or no more. Nobody arrives a turn of the ring
  // ahead of the others.
  __device__ __forceinline__ void pass(uint32_t n) {
    Slot const slot(n);
    wait_for(&barriers_.copied[slot.stage], slot.parity);
    release(n);
  }

 private:
  __device__ __forceinline__ void release(uint32_t n) {
    __syncwarp();
    if (cute::elect_one_sync()) device::arrive(&barriers_.read[Slot(n).stage]);
  }

  Barriers& barriers_;
  uint64_t ring_;
  uint32_t filter_[kProducts][4];
};

template <class Traits>
__device__ __forceinline__ void consume_lines(Params const& p, Maps const& maps, Block const& block,
                                              Barriers& barriers, unsigned char* shared,
                                              int index) {
  constexpr Reach kReach = Traits::kReach;
  int const warp = __reduce_max_sync(~0u, int(threadIdx.x % kWarpgroupThreads / 32));
  int const lane = int(threadIdx.x % 32u);
  Consumer<Traits> consumer(p, block, barriers, device::shared_address(shared));
  Outputs<Traits> const outputs(
      p, block,
      shared + kReach.staged_at() + index * kStagedBytes + warp * (kStagedBytes / kWarpgroupWarps),
      warp, lane);
  int const column = block.strip * kPositions;
  uint32_t n = 0;  // of the segment's first line of input
  for (Segments segment(p, block); segment.advance(p);) {
    int const lines = segment.lines + kTaps - 1;
    int passed = min(index, segment.lines);
#pragma unroll 1
    for (int i = 0; i < passed; ++i) consumer.pass(n + i);
#pragma unroll 1
    for (int line = index; line < segment.lines; line += kConsumers) {
      float sums[kSums];
      consumer.multiply(n + line, sums);
      outputs.store(maps, segment.sample, segment.first + line, column, sums);
      passed = line + kConsumers;
    }
#pragma unroll 1
    for (; passed < lines; ++passed) consumer.pass(n + passed);
    n += lines;
  }
  // Shared memory lives until all copies have read it.
  if (lane == 0) device::wait_stores_read();
}

template <class Traits>
__global__ void __launch_bounds__(kThreads, 1)
    convolve(__grid_constant__ Params const p, __grid_constant__ Maps const maps) {
  constexpr Reach kReach = Traits::kReach;
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& barriers = *reinterpret_cast<Barriers*>(shared + kReach.barriers_at());
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      device::init_barrier(&barriers.brought[i], 1);
      device::init_barrier(&barriers.copied[i], kCopyWarps);
      device::init_barrier(&barriers.read[i], kConsumers * kWarpgroupWarps);
    }
    device::fence_barrier_init();
    device::fence_async_proxy();
  }
  __syncthreads();
  Block const block(p);
  // Uniform, as the compiler sees it too: it would serialise products that might diverge.
  int const role = __reduce_max_sync(~0u, int(threadIdx.x) / kWarpgroupThreads);
  if (role < kConsumers) {
    cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
    consume_lines<Traits>(p, maps, block, barriers, shared, role);
    return;
  }
  cutlass::arch::warpgroup_reg_dealloc<kCopyRegisters>();
  int const warp = __reduce_max_sync(~0u, int(threadIdx.x % kWarpgroupThreads / 32));
  if (warp == kCopyWarps) {
    if (threadIdx.x % 32 == 0) bring_lines<kReach>(p, maps, block, barriers, shared);
  } else {
    make_copies<kReach>(p, block, barriers, device::shared_address(shared), warp);
  }
}

}  // namespace fusedconv::conv::sm90::strips
