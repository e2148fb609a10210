// The convolution whose filter is the instruction's first operand: products of up to 192 positions
// by 64 columns, which read two thirds of the shared memory that as many of 64 positions by 64 do.
//
// The filter stays in shared memory, a box has what all taps of a chunk and a plane read, and three
// consumer warpgroups take boxes in turns. A box is lines of eight positions. Where the image ends
// within it, products are of fewer lines.
#pragma once

#include <cstdint>
#include <utility>

#include "conv/sm90/boxes/copies.hpp"
#include "conv/sm90/boxes/filter_first_epilogue.hpp"
#include "conv/sm90/boxes/operand.hpp"
#include "conv/sm90/boxes/params.hpp"
#include "conv/sm90/boxes/traits.hpp"
#include "conv/sm90/wait.hpp"
#include "cuda/async.hpp"
#include "cuda/early.hpp"
#include "cute/arch/cluster_sm90.hpp"
#include "cute/arch/copy_sm90_desc.hpp"
#include "cutlass/arch/reg_reconfig.h"

namespace fusedconv::conv::sm90::boxes {

// A tile's boxes, one for each chunk and plane of taps.
__device__ __forceinline__ int tile_boxes(Params const& p, Block const& block) {
  int planes = 0;
  for (int tap = 0; tap < block.taps; ++tap) planes += p.starts_box[block.first_tap + tap];
  return planes * p.chunks;
}

template <class Traits>
__device__ __forceinline__ void fill_boxes(Params const& p, Maps const& maps, Barriers& barriers,
                                           unsigned char* shared) {
  device::RingCursor cursor{.stage = 0, .parity = 1};
  for (Items<Traits> item(p); item.present(); item.advance()) {
    Block const block(p, item.block);
    Slab const slab(p, item.tile);
    for (int chunk = 0; chunk < p.chunks; ++chunk) {
      for (int tap = block.first_tap; tap < block.first_tap + block.taps; ++tap) {
        if (!p.starts_box[tap]) continue;
        TapCopy const copied = p.taps[tap];
        uint64_t* const full = &barriers.full_boxes[cursor.stage];
        wait_for(&barriers.empty_boxes[cursor.stage], cursor.parity);
        device::arrive_and_expect(full, p.box_bytes);
        cute::SM90_TMA_LOAD_5D::copy(
            &maps.reads[copied.source], full, uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL),
            shared + cursor.stage * p.halo_bytes, chunk * Traits::kChunk,
            slab.origin[2] + copied.shift[2], slab.origin[1] + copied.shift[1],
            slab.origin[0] + copied.shift[0], slab.sample);
        cursor.advance(kHaloStages);
      }
    }
  }
}

// A consumer's products.
template <class Traits>
class FilterFirst {
 public:
  __device__ __forceinline__ FilterFirst(Params const& p, Barriers& barriers, uint32_t shared,
                                         int index)
      : p_(p),
        barriers_(barriers),
        block_(p, Items<Traits>(p).block),
        boxes_(tile_boxes(p, block_)),
        positions_(rows_operand(shared, p.eights_bytes)),
        filter_(Traits::kFilterLines ? lines_operand<Traits>(shared + p.memory.kept, p.line_bytes)
                                     : rows_operand(shared + p.memory.kept)) {
    cursor_.jump(boxes_ * index, kHaloStages);
  }

  __device__ __forceinline__ Block const& block() const { return block_; }

  // Adds those of a tile's first lines. pass_turn: once all products are under way.
  template <int kChoice = 0, class PassTurn>
  __device__ __forceinline__ void multiply(int lines, LineSums<Traits>& sums,
                                           PassTurn const& pass_turn) {
    constexpr int kLines = kProductLines[kChoice];
    if constexpr (kLines < Traits::kLines) {
      if (lines > kLines) return multiply<kChoice + 1>(lines, sums, pass_turn);
    }
    multiply_lines<kLines>(sums, pass_turn);
  }

 private:
  template <int kLines, class PassTurn>
  __device__ __forceinline__ void multiply_lines(LineSums<Traits>& sums,
                                                 PassTurn const& pass_turn) {
    using Own =
        Instruction<Traits::kMath, kLines * kHaloLine,
                    Traits::kFilterLines ? gmma::Major::MN : gmma::Major::K, gmma::Major::K>;
    using Indices = std::make_integer_sequence<int, kLines * kLineSums>;
    constexpr int kStepChannels = kStepBytes / Traits::kElementBytes;
    uint32_t const filter_units =
        (Traits::kFilterLines ? kStepChannels * p_.line_bytes : kStepBytes) >> 4;
    int const steps = block_.taps * p_.chunks;
#pragma unroll
    for (float& sum : sums) cute::warpgroup_fence_operand(sum);
    uint64_t a = filter_;
    int tap = block_.first_tap, behind = -1;
#pragma unroll 1
    for (int step = 0; step < steps;) {
      wait_for(&barriers_.full_boxes[cursor_.stage], cursor_.parity);
      uint64_t const box = positions_ + (uint32_t(cursor_.stage * p_.halo_bytes) >> 4);
#pragma unroll 1
      do {
        cute::warpgroup_arrive();
        uint64_t const b = box + (uint32_t(p_.offsets[tap]) * kChunkBytes >> 4);
#pragma unroll
        for (int i = 0; i < Traits::kSteps; ++i) {
          boxes::multiply<typename Own::Mma>(a + i * filter_units, b + i * (kStepBytes >> 4), sums,
                                             Indices{});
        }
        a += Traits::kColumns * kChunkBytes >> 4;
        if (++tap == block_.first_tap + block_.taps) tap = block_.first_tap;
      } while (++step < steps && !p_.starts_box[tap]);
      cute::warpgroup_commit_batch();
      if (step == steps) pass_turn();
      cute::warpgroup_wait<1>();
      if (behind >= 0) release(behind);
      behind = cursor_.stage;
      cursor_.advance(kHaloStages);
    }
    cute::warpgroup_wait<0>();
#pragma unroll
    for (float& sum : sums) cute::warpgroup_fence_operand(sum);
    if (behind >= 0) release(behind);
    cursor_.jump(boxes_ * (Traits::kOwnConsumers - 1), kHaloStages);
  }

  __device__ __forceinline__ void release(int stage) {
    if (cute::elect_one_sync()) device::arrive(&barriers_.empty_boxes[stage]);
  }

  Params const& p_;
  Barriers& barriers_;
  Block block_;
  int boxes_;
  uint64_t positions_, filter_;
  device::RingCursor cursor_;
};

template <class Traits, Extra kExtra>
__device__ __forceinline__ void consume_boxes(Params const& p, Maps const& maps, Barriers& barriers,
                                              unsigned char* shared, Consumer const& self) {
  FilterFirst<Traits> products(p, barriers, device::shared_address(shared), self.index);
  OwnRows<Traits> const rows(p, products.block(), self);
  unsigned char* const staged =
      shared + p.memory.staged +
      self.index * Traits::kShape.staged_portions() * Memory::kPortionBytes;
  // A consumer's products begin once all of those in front are under way.
  auto const turn_of = [](int index) { return 1 + Traits::kOwnConsumers + index; };
  constexpr int kBoth = 2 * kWarpgroupThreads;
  int const next = self.index + 1 < Traits::kOwnConsumers ? self.index + 1 : 0;
  auto const pass_turn = [&] { device::arrive_threads(turn_of(next), kBoth); };
  if (next == 0) pass_turn();
  wait_for(&barriers.kept, 0);
  Items<Traits> item(p);
  for (item.advance(self.index); item.present(); item.advance(Traits::kOwnConsumers)) {
    Slab const slab(p, item.tile);
    Extent const extent(p, slab);
    LineSums<Traits> sums;
    rows.begin(sums);
    device::sync_threads(turn_of(self.index), kBoth);
    products.multiply(extent.lines, sums, pass_turn);
    finish_rows<Traits, kExtra>(p, maps, products.block(), slab, extent, self, rows, sums, staged);
  }
}

template <class Traits, Extra kExtra>
__global__ void __launch_bounds__(Traits::kBlockThreads, Traits::kResidents)
    convolve_filter_first(__grid_constant__ Params const p, __grid_constant__ Maps const maps) {
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& barriers = *reinterpret_cast<Barriers*>(shared + p.memory.barriers);
  if (threadIdx.x == Traits::kOwnConsumers * kWarpgroupThreads) {
    cute::prefetch_tma_descriptor(&maps.reads[0]);
    if (!p.packed) cute::prefetch_tma_descriptor(&maps.weight);
  }
  if (threadIdx.x == 0) {
    device::init_barrier(&barriers.kept, 1);
    for (int i = 0; i < kHaloStages; ++i) {
      device::init_barrier(&barriers.full_boxes[i], 1);
      device::init_barrier(&barriers.empty_boxes[i], kWarpgroupWarps);
    }
    device::fence_barrier_init();
  }
  __syncthreads();
  // Uniform, as the compiler sees it too: it would serialise products that might diverge.
  int const role = __reduce_max_sync(~0u, int(threadIdx.x) / kWarpgroupThreads);
  if (role == Traits::kOwnConsumers) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kLeftRegisters>();
    int const warp = __reduce_max_sync(~0u, int(threadIdx.x) / 32);
    if (warp != Traits::kOwnConsumers * kWarpgroupWarps || !cute::elect_one_sync()) return;
    if (p.packed) device::wait_for_launch_in_front();
    keep_filter<Traits>(p, maps, Block(p, Items<Traits>(p).block), barriers,
                        shared + p.memory.kept);
    fill_boxes<Traits>(p, maps, barriers, shared);
    return;
  }
  cutlass::arch::warpgroup_reg_alloc<Traits::kOwnRegisters>();
  int const thread = int(threadIdx.x) % kWarpgroupThreads;
  Consumer const self{.index = role,
                      .thread = thread,
                      .warp = __reduce_max_sync(~0u, thread / 32),
                      .lane = int(threadIdx.x % 32u)};
  consume_boxes<Traits, kExtra>(p, maps, barriers, shared, self);
  if (self.thread == 0) {
    // Shared memory lives until all copies have read it.
    device::wait_stores_read();
    // What is behind this launch is behind the one in front of it too.
    device::wait_for_launch_in_front();
  }
}

}  // namespace fusedconv::conv::sm90::boxes
