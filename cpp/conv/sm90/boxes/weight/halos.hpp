// The weight gradient of planes of three by three taps, with stride 1, in 16 bits: a box of the
// gradient with a halo has what all taps read.
//
// Three consumer warpgroups multiply the same input channels by a line of taps each. The pixels
// that a tap reads are those of the tap before, shifted: to the instruction they are 64 further
// columns that begin so many bytes on, as the swizzle is a pattern of addresses.
#pragma once

#include <cstdint>

#include "conv/sm90/boxes/operand.hpp"
#include "conv/sm90/boxes/weight/barriers.hpp"
#include "conv/sm90/boxes/weight/kernel.hpp"
#include "conv/sm90/boxes/weight/params.hpp"
#include "conv/sm90/boxes/weight/store_weight.hpp"
#include "conv/sm90/partial_sums.hpp"
#include "conv/sm90/wait.hpp"
#include "cuda/async.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cutlass/arch/reg_reconfig.h"

namespace fusedconv::conv::sm90::boxes::weight {

template <Math kMath_>
struct HaloTraits {
  static constexpr Math kMath = kMath_;
  static constexpr Block kBlock{.channels = 1, .units = kHaloTaps * kHaloTaps, .halo = true};
  static constexpr bool kFromRegisters = false, kDividesChannels = false;
  static constexpr int kOwnUnits = kHaloTaps;
  static constexpr int kColumns = kOwnUnits * kUnit;
  using Mma = typename Instruction<kMath, kColumns>::Mma;
  using Element = typename Instruction<kMath, kColumns>::Element;
  static constexpr int kSums = kColumns / 2;  // of a thread
  static constexpr int kSteps = kBlock.additions();
  static constexpr int kBlockThreads = (kBlock.consumers() + 1) * kWarpgroupThreads;
  static constexpr int kOwnRegisters = 160, kOtherRegisters = 32;
  static_assert((kBlock.consumers() * kOwnRegisters + kOtherRegisters) * kWarpgroupThreads <= 65536,
                "registers of a multiprocessor");
};

// A task's taps: all of a plane, of some output channels.
template <class Traits>
__device__ __forceinline__ void fill_halos(Params const& p, Maps const& maps, Barriers& barriers,
                                           unsigned char* shared) {
  constexpr auto kHint = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  BlockWork const work(p);
  Task const task(p, work.task);
  Unit const first(p, task.unit_block * Traits::kBlock.units);
  Tap const shift = p.taps[first.tap];  // the lowest of the plane's
  CUtensorMap const* const source = &maps.sources[p.tap_sources[first.tap]];
  device::RingCursor cursor{.stage = 0, .parity = 1};
  int const last = work.last(p);
  for (int slab = work.first(p); slab < last; ++slab) {
    Origin const at(p, slab);
    uint64_t* const full = &barriers.full[cursor.stage];
    unsigned char* const stage = shared + cursor.stage * p.stage_bytes;
    wait_for(&barriers.empty[cursor.stage], cursor.parity);
    device::arrive_and_expect(full, p.box_bytes + p.halo_bytes);
    cute::SM90_TMA_LOAD_5D::copy(&maps.input, full, kHint, stage, task.channel_block * kUnit, at.w,
                                 at.h, at.d, at.sample);
    cute::SM90_TMA_LOAD_5D::copy(source, full, kHint, stage + p.box_bytes, first.channel,
                                 at.w + shift[2], at.h + shift[1], at.d + shift[0], at.sample);
    cursor.advance(p.stages);
  }
}

template <class Traits>
__device__ __forceinline__ void consume_halos(Params const& p, Barriers& barriers,
                                              unsigned char* shared, int consumer, int thread) {
  using Indices = std::make_integer_sequence<int, Traits::kSums>;
  constexpr Block kBlock = Traits::kBlock;
  constexpr int kRows = 8 * kChunkBytes;  // eight, after which a swizzle repeats
  constexpr uint32_t kLineUnits = kHaloPositions * kChunkBytes >> 4;
  uint32_t const ring = device::shared_address(shared);
  uint64_t const channels0 = operand(ring, gmma::LayoutType::B128, 0, kRows);
  uint64_t const taps0 = operand(ring + p.box_bytes + consumer * p.tap_line_bytes,
                                 gmma::LayoutType::B128, p.tap_bytes, kRows);
  uint32_t const halo_units = uint32_t(p.line_bytes) >> 4;
  bool const signals = thread % 32 == 0;
  BlockWork const work(p);
  Task const task(p, work.task);
  int left = work.last(p) - work.first(p);
  float sums[1][Traits::kSums];
#pragma unroll
  for (int i = 0; i < Traits::kSums; ++i) sums[0][i] = 0.0f;
  auto* const partials =
      reinterpret_cast<float4*>(p.partials + partial_index(p, work.task, work.split, kBlock) +
                                consumer * Traits::kSums * kWarpgroupThreads) +
      thread;
  device::RingCursor cursor;
  bool first = true;
  while (left > 0) {
    int const count = min(left, kFlushAdditions / Traits::kSteps);
    left -= count;
    int in_flight = -1;  // the stage that products in flight read
#pragma unroll 1
    for (int step = 0; step < count; ++step) {
      uint32_t const offset = uint32_t(cursor.stage * p.stage_bytes) >> 4;
      uint64_t const channels = channels0 + offset, taps = taps0 + offset;
      wait_for(&barriers.full[cursor.stage], cursor.parity);
      cute::warpgroup_arrive();
#pragma unroll
      for (int i = 0; i < Traits::kSteps; ++i) {
        multiply<typename Traits::Mma>(channels + i * kLineUnits, taps + i * halo_units, sums[0],
                                       Indices{});
      }
      cute::warpgroup_commit_batch();
      cute::warpgroup_wait<1>();
      if (in_flight >= 0 && signals) device::arrive(&barriers.empty[in_flight]);
      in_flight = cursor.stage;
      cursor.advance(p.stages);
    }
    cute::warpgroup_wait<0>();
    if (signals) device::arrive(&barriers.empty[in_flight]);
#pragma unroll
    for (int i = 0; i < Traits::kSums; ++i) cute::warpgroup_fence_operand(sums[0][i]);
    if (p.grad_weight != nullptr) {  // after all slabs
      store_weight<Traits>(p, task, consumer, thread, sums);
      break;
    }
#pragma unroll
    for (int i = 0; i < Traits::kSums / 4; ++i) {
      float (&own)[Traits::kSums] = sums[0];
      leave_sums(partials + i * kWarpgroupThreads,
                 make_float4(own[4 * i], own[4 * i + 1], own[4 * i + 2], own[4 * i + 3]), first);
      own[4 * i] = own[4 * i + 1] = own[4 * i + 2] = own[4 * i + 3] = 0.0f;
    }
    first = false;
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kBlockThreads, 1)
    sum_halo_products(__grid_constant__ Params const p, __grid_constant__ Maps const maps) {
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& barriers = *reinterpret_cast<Barriers*>(shared + p.stages * p.stage_bytes);
  constexpr int kOwnConsumers = Traits::kBlock.consumers();
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.stages; ++i) {
      device::init_barrier(&barriers.full[i], 1);
      device::init_barrier(&barriers.empty[i], kOwnConsumers * kWarpgroupWarps);
    }
    device::fence_barrier_init();
  }
  __syncthreads();
  int const role = __reduce_max_sync(~0u, int(threadIdx.x) / kWarpgroupThreads);
  if (role == kOwnConsumers) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kOtherRegisters>();
    if (threadIdx.x == kOwnConsumers * kWarpgroupThreads) {
      fill_halos<Traits>(p, maps, barriers, shared);
    }
    return;
  }
  cutlass::arch::warpgroup_reg_alloc<Traits::kOwnRegisters>();
  consume_halos<Traits>(p, barriers, shared, role, int(threadIdx.x) % kWarpgroupThreads);
}

}  // namespace fusedconv::conv::sm90::boxes::weight
