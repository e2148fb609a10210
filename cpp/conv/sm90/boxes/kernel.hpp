// The convolution: consumer warpgroups multiply what a thread or two have copied, tile after tile.
#pragma once

#include <cstdint>
#include <utility>

#include "conv/sm90/boxes/copies.hpp"
#include "conv/sm90/boxes/epilogue.hpp"
#include "conv/sm90/boxes/linear.hpp"
#include "conv/sm90/boxes/operand.hpp"
#include "conv/sm90/boxes/params.hpp"
#include "conv/sm90/boxes/traits.hpp"
#include "cuda/async.hpp"
#include "cuda/early.hpp"
#include "cute/arch/cluster_sm90.hpp"
#include "cute/arch/config.hpp"
#include "cute/arch/copy_sm90_desc.hpp"
#include "cutlass/arch/reg_reconfig.h"

#if defined(__CUDA_ARCH__) && !defined(CUTE_ARCH_MMA_SM90A_ENABLED)
#error "compile the Hopper family for compute capability 9.0a alone"
#endif

namespace fusedconv::conv::sm90::boxes {

// Boxes with halos, as a consumer goes through them.
template <class Traits>
class HaloBoxes {
 public:
  __device__ __forceinline__ HaloBoxes(Params const& p, Barriers& barriers)
      : p_(p), barriers_(barriers) {}

  // What a tap's products read, given what they would of the first row of the first box.
  __device__ __forceinline__ uint64_t positions(uint64_t first, int tap) {
    if (p_.starts_box[tap]) {
      wait_for(&barriers_.full_boxes[cursor_.stage], cursor_.parity);
      behind_ = current_;
      current_ = cursor_.stage;
      cursor_.advance(kHaloStages);
    }
    int const rows = p_.offsets[tap];
    return first + (uint32_t(current_ * Traits::kShape.slabs() * p_.halo_bytes) >> 4) +
           (uint32_t(rows) * kChunkBytes >> 4);
  }
  // Once no products read the box before any more.
  __device__ __forceinline__ void release_behind() {
    if (behind_ >= 0) release(behind_);
    behind_ = -1;
  }
  // Once no products of the tile are left.
  __device__ __forceinline__ void release_current() {
    if (current_ >= 0) release(current_);
    current_ = -1;
  }

 private:
  __device__ __forceinline__ void release(int stage) {
    if (cute::elect_one_sync()) device::arrive(&barriers_.empty_boxes[stage]);
  }

  Params const& p_;
  Barriers& barriers_;
  device::RingCursor cursor_;
  int current_ = -1, behind_ = -1;
};

template <class Traits, Extra kExtra>
__device__ __forceinline__ void consume(Params const& p, Maps const& maps, Barriers& barriers,
                                        unsigned char* shared, Consumer const& self) {
  using Indices = std::make_integer_sequence<int, Traits::kSums>;
  uint32_t const ring = device::shared_address(shared);
  constexpr bool kPingPong = Traits::kShape.ping_pong;
  constexpr int kSlabs = Traits::kShape.slabs();
  int const own_slab = kPingPong ? 0 : self.index;  // of a tile
  uint32_t const own = ring + own_slab * (Traits::kHalo ? p.halo_bytes : kSlab * kChunkBytes);
  int const line_bytes = p.box[2] * Traits::kElementBytes;
  uint64_t const positions0 =
      Traits::kPlanes ? lines_operand<Traits>(own, line_bytes)
                      : rows_operand(own, Traits::kHalo ? p.eights_bytes : 8 * kChunkBytes);
  uint32_t const filter = ring + (Traits::kStationary ? p.memory.kept
                                  : Traits::kHalo     ? p.memory.ring
                                                      : kSlabs * kSlab * kChunkBytes);
  uint64_t const filter0 =
      Traits::kFilterLines ? lines_operand<Traits>(filter, p.line_bytes) : rows_operand(filter);
  // To the channels of the next instruction.
  constexpr int kStepChannels = kStepBytes / Traits::kElementBytes;
  uint32_t const step_units = (Traits::kPlanes ? kStepChannels * line_bytes : kStepBytes) >> 4;
  uint32_t const filter_units =
      (Traits::kFilterLines ? kStepChannels * p.line_bytes : kStepBytes) >> 4;
  unsigned char* const staged =
      shared + p.memory.staged +
      self.index * Traits::kShape.staged_portions() * Memory::kPortionBytes;
  unsigned char* const own_values =
      Traits::kOwnValues ? shared + p.memory.values + self.index * int(sizeof(ColumnValues<Traits>))
                         : staged;
  device::RingCursor cursor;
  auto const release = [&](int stage) {
    if (cute::elect_one_sync()) device::arrive(&barriers.empty[stage]);
  };
  HaloBoxes<Traits> boxes(p, barriers);
  // Who takes turns begins with products once the one before has found all of its stages full: a
  // barrier's parity tells phases apart that follow each other, no others.
  auto const turn_of = [](int index) { return 1 + Traits::kOwnConsumers + index; };
  constexpr int kBoth = 2 * kWarpgroupThreads;
  int const next = self.index + 1 < Traits::kOwnConsumers ? self.index + 1 : 0;
  int whose = 0;
  auto const pass_turn = [&] { device::arrive_threads(turn_of(next), kBoth); };
  if (kPingPong && next == 0) pass_turn();
  Items<Traits> item(p);
  // A consumer goes to its own tiles at once where all have as many steps.
  int others_steps = 0;
  if constexpr (Traits::kStationary) {
    wait_for(&barriers.kept, 0);
    int const steps = Block(p, item.block).taps * p.chunks;
    others_steps = steps * (Traits::kOwnConsumers - 1);
    item.advance(self.index);
    cursor.jump(steps * self.index, p.stages);
  }
  auto const advance = [&] {
    if constexpr (Traits::kStationary) {
      item.advance(Traits::kOwnConsumers);
      cursor.jump(others_steps, p.stages);
    } else {
      item.advance();
    }
  };
  for (; item.present(); advance()) {
    Block const block(p, item.block);
    int const steps = block.taps * p.chunks;
    if constexpr (kPingPong && !Traits::kStationary) {
      bool const others = whose != self.index;
      if (++whose == Traits::kOwnConsumers) whose = 0;
      if (others) {
        cursor.jump(steps, p.stages);
        continue;
      }
    }
    Slab const slab(p, item.tile * kSlabs + own_slab);
    OwnColumns<Traits, kExtra> columns;
    if (!Traits::kStationary || !p.keeps_values) columns.load_early(p, block, self);
    if constexpr (kPingPong) device::sync_threads(turn_of(self.index), kBoth);
    int tap = 0;
    Sums<Traits> sums;
    for_each_sum<Traits>(sums, [](float& sum) { sum = 0.0f; });
    for_each_sum<Traits>(sums, [](float& sum) { cute::warpgroup_fence_operand(sum); });
    int in_flight = -1;  // the stage that products in flight read
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      uint32_t const offset = uint32_t(cursor.stage * Traits::kShape.stage_bytes()) >> 4;
      uint64_t a = positions0 + offset;
      if constexpr (Traits::kHalo) a = boxes.positions(positions0, block.first_tap + tap);
      uint64_t b =
          filter0 + (Traits::kStationary ? step * Traits::kColumns * kChunkBytes >> 4 : offset);
      uint32_t const mask = Traits::kSegments == 1 ? 1 : p.masks[block.first_tap + tap];
      if (++tap == block.taps) tap = 0;
      wait_for(&barriers.full[cursor.stage], cursor.parity);
      // All stages of the tile are full: the next one may begin, which takes the time of some
      // products; where the filter stays, once the last are under way.
      constexpr bool kPassesEarly = kPingPong && !Traits::kStationary;
      if (kPassesEarly && step + 1 == steps) pass_turn();
      cute::warpgroup_arrive();
#pragma unroll
      for (int part = 0; part < Traits::kInstructions; ++part) {
        if (Traits::kSegments > 1 && (mask >> part * Traits::kAlike & 1) == 0) continue;
#pragma unroll
        for (int i = 0; i < Traits::kSteps; ++i) {
          multiply<typename Traits::Mma>(a + i * step_units, b + i * filter_units, sums[part],
                                         Indices{});
        }
        b += Traits::kInstructionColumns * kChunkBytes >> 4;
      }
      cute::warpgroup_commit_batch();
      if (kPingPong && !kPassesEarly && step + 1 == steps) pass_turn();
      cute::warpgroup_wait<1>();
      if (in_flight >= 0) release(in_flight);
      if constexpr (Traits::kHalo) boxes.release_behind();
      in_flight = cursor.stage;
      cursor.advance(p.stages);
    }
    if (kPingPong && steps == 0) pass_turn();
    // A block by itself has the last products to hide this behind. Where two share the
    // multiprocessor, the other's are, and the copies want the last stage back first.
    constexpr bool kLeavesEarly = !Traits::kScarce;
    auto const leave = [&] {
      if (Traits::kStationary && p.keeps_values) return;
      if (!slab.present) return;
      columns.leave(p, block, slab, first_result(p), self, ColumnValues<Traits>::in(own_values));
    };
    if constexpr (kLeavesEarly) leave();
    cute::warpgroup_wait<0>();
    for_each_sum<Traits>(sums, [](float& sum) { cute::warpgroup_fence_operand(sum); });
    if (in_flight >= 0) release(in_flight);
    if constexpr (Traits::kHalo) boxes.release_current();
    if constexpr (!kLeavesEarly) leave();
    if (!slab.present) continue;
    unsigned char* const values =
        Traits::kStationary && p.keeps_values ? shared + p.memory.values : own_values;
    finish<Traits, kExtra>(p, maps, block, slab, self, columns, sums, staged,
                           ColumnValues<Traits>::in(values));
  }
}

template <class Traits, Extra kExtra>
__global__ void __launch_bounds__(Traits::kBlockThreads, Traits::kResidents)
    convolve(__grid_constant__ Params const p, __grid_constant__ Maps const maps) {
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& barriers = *reinterpret_cast<Barriers*>(shared + p.memory.barriers);
  if (threadIdx.x == Traits::kOwnConsumers * kWarpgroupThreads) {
    cute::prefetch_tma_descriptor(&maps.reads[0]);
    if (!p.packed) cute::prefetch_tma_descriptor(&maps.weight);
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.stages; ++i) {
      device::init_barrier(&barriers.full[i], 1);
      device::init_barrier(&barriers.empty[i], Traits::kShape.slabs() * kWarpgroupWarps);
    }
    device::init_barrier(&barriers.kept, 1);
    for (int i = 0; i < kHaloStages; ++i) {
      device::init_barrier(&barriers.full_boxes[i], 1);
      device::init_barrier(&barriers.empty_boxes[i], Traits::kShape.slabs() * kWarpgroupWarps);
    }
    device::fence_barrier_init();
  }
  if constexpr (Traits::kStationary) {
    if (p.keeps_values && threadIdx.x < kWarpgroupThreads) {
      OwnColumns<Traits, kExtra> columns;
      columns.keep(p, Block(p, Items<Traits>(p).block), int(threadIdx.x),
                   ColumnValues<Traits>::in(shared + p.memory.values));
    }
  }
  __syncthreads();
  // Uniform, as the compiler sees it too: it would serialise products that might diverge.
  int const role = __reduce_max_sync(~0u, int(threadIdx.x) / kWarpgroupThreads);
  if (role == Traits::kOwnConsumers) {
    if constexpr (Traits::kGivesRegisters) {
      cutlass::arch::warpgroup_reg_dealloc<Traits::kLeftRegisters>();
    }
    int const producer =
        __reduce_max_sync(~0u, int(threadIdx.x) / 32 - Traits::kOwnConsumers * kWarpgroupWarps);
    if (producer >= Traits::kProducers || !cute::elect_one_sync()) return;
    if (p.packed) device::wait_for_launch_in_front();
    if constexpr (Traits::kStationary) {
      if (producer == 0) {
        keep_filter<Traits>(p, maps, Block(p, Items<Traits>(p).block), barriers,
                            shared + p.memory.kept);
      }
    }
    fill_ring<Traits>(p, maps, barriers, shared, producer);
    return;
  }
  if constexpr (Traits::kGivesRegisters) {
    cutlass::arch::warpgroup_reg_alloc<Traits::kOwnRegisters>();
  }
  int const thread = int(threadIdx.x) % kWarpgroupThreads;
  Consumer const self{.index = role,
                      .thread = thread,
                      .warp = __reduce_max_sync(~0u, thread / 32),
                      .lane = int(threadIdx.x % 32u)};
  consume<Traits, kExtra>(p, maps, barriers, shared, self);
  if (self.thread == 0) {
    // Shared memory lives until all copies have read it.
    device::wait_stores_read();
    // What is behind this launch is behind the one in front of it too.
    device::wait_for_launch_in_front();
  }
}

}  // namespace fusedconv::conv::sm90::boxes
