// The kernel; schedule.hpp says what it computes and how.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <utility>

#include "conv/sm90/boxes/operand.hpp"
#include "conv/sm90/phases/outputs.hpp"
#include "conv/sm90/phases/params.hpp"
#include "conv/sm90/phases/traits.hpp"
#include "conv/sm90/wait.hpp"
#include "cuda/async.hpp"
#include "cuda/early.hpp"
#include "cute/arch/cluster_sm90.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cutlass/arch/reg_reconfig.h"

namespace fusedconv::conv::sm90::phases {

struct Barriers {
  uint64_t kept;
  uint64_t full[kMostStages], empty[kMostStages];
};
static_assert(sizeof(Barriers) <= kBarrierBytes);

// What becomes of sums: results, or moments of biased sums. A kernel of its own each: where
// one had both, ptxas would not keep sums in place.
enum class Does { kFinishes, kTakesMoments };

// Of one bulk copy of the filter.
inline constexpr uint32_t kMostCopied = 1 << 15;

__device__ __forceinline__ void copy_all(Params const& p, CUtensorMap const& map,
                                         Barriers& barriers, unsigned char* shared) {
  constexpr auto kHint = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  device::wait_for_launch_in_front();  // the filter is packed
  device::arrive_and_expect(&barriers.kept, uint32_t(p.kept_bytes));
  unsigned char const* const filter =
      p.filter + int64_t(blockIdx.x) % p.channel_blocks * p.kept_bytes;
  for (uint32_t at = 0; at < uint32_t(p.kept_bytes); at += kMostCopied) {
    device::bulk_load(device::shared_address(shared + at), filter + at,
                      min(kMostCopied, uint32_t(p.kept_bytes) - at), &barriers.kept);
  }
  device::RingCursor cursor{.stage = 0, .parity = 1};
  for (Parts part(p); part.present(); part.advance(p)) {
#pragma unroll 1
    for (int tile = part.first_tile; tile < part.end_tile; ++tile) {
      Origin const origin(p, tile);
#pragma unroll 1
      for (int chunk = 0; chunk < p.chunks; ++chunk) {
        uint64_t* const full = &barriers.full[cursor.stage];
        wait_for(&barriers.empty[cursor.stage], cursor.parity);
        device::arrive_and_expect(full, uint32_t(p.halo_bytes));
        cute::SM90_TMA_LOAD_5D::copy(&map, full, kHint,
                                     shared + p.ring_offset + cursor.stage * p.stage_bytes,
                                     chunk * kChunk, origin.w + p.shifts[2], origin.h + p.shifts[1],
                                     origin.d + p.shifts[0], part.sample);
        cursor.advance(p.stages);
      }
    }
  }
}

// Units of 16 bytes of 16 channels of a phase's columns.
template <class Traits>
inline constexpr uint32_t kTapUnits = Traits::kChannels * kStepChannels / kVector;

template <class Traits, int kFirst, int... kIndex>
__device__ __forceinline__ void multiply_tap(uint64_t input, uint64_t filter,
                                             float (&sums)[Traits::kSums], gmma::ScaleOut sums_are,
                                             std::integer_sequence<int, kIndex...>) {
  Traits::Mma::fma(input, filter, sums[kFirst + kIndex]..., sums_are);
}

// kFirst: of a plane's, which sums begin with.
template <class Traits, bool kFirst, int... kNumber>
__device__ __forceinline__ void multiply_round(uint64_t input, uint64_t filter,
                                               float (&sums)[Traits::kSums],
                                               std::integer_sequence<int, kNumber...>) {
  auto const multiply = [&](auto number) {
    constexpr Product kOwn = Products().values[number];
    constexpr int kNext = kOwn.neighbour / kHeight * kHaloEdge + kOwn.neighbour % kHeight;
    multiply_tap<Traits, kOwn.phase * Traits::kPhaseSums>(
        input + (kNext * kRowBytes >> 4), filter + number * kTapUnits<Traits>, sums,
        kFirst && kOwn.neighbour == 0 ? gmma::ScaleOut::Zero : gmma::ScaleOut::One,
        std::make_integer_sequence<int, Traits::kPhaseSums>{});
  };
  (multiply(std::integral_constant<int, kNumber>{}), ...);
}

template <class Traits, Does kDoes>
__device__ __forceinline__ void consume(Params const& p, Barriers& barriers, unsigned char* shared,
                                        int self) {
  constexpr int kConsumers = Traits::kConsumers, kPlanes = Traits::kPlanes;
  constexpr uint32_t kInputStep = kStepChannels * 2 >> 4;
  constexpr int kChunkSteps = kChunk / kStepChannels;
  constexpr uint32_t kInputPlane = kHaloEdge * kHaloEdge * kRowBytes >> 4;
  constexpr uint32_t kRound = kProducts * kTapUnits<Traits>;
  uint32_t const base = device::shared_address(shared);
  uint64_t const input0 =
      boxes::operand(base + p.ring_offset, gmma::LayoutType::B128, 0, kHaloEdge * kRowBytes);
  uint64_t const filter0 =
      boxes::operand(base, gmma::LayoutType::INTERLEAVE, Traits::kChannels * 16, 8 * 16);
  auto* const values =
      reinterpret_cast<Values<Traits::kChannels>*>(shared + p.values_offset) + self;
  Outputs<Traits> outputs(p, *values, self);
  auto const release = [&](int stage) {
    if (cute::elect_one_sync()) device::arrive(&barriers.empty[stage]);
  };
  // Consumers have planes of tiles in turns. Who takes its turn begins with products once the one
  // before has found all of its stages full: so one's outputs are finished beside another's
  // products, and nobody waits for a use of a stage that is two on, which a barrier's parity does
  // not tell apart.
  constexpr int kBoth = 2 * kWarpgroup;
  auto const turn_of = [](int index) { return 1 + index; };
  int const next = self + 1 < kConsumers ? self + 1 : 0;
  auto const pass_turn = [&] { device::arrive_threads(turn_of(next), kBoth); };
  if (next == 0) pass_turn();
  device::RingCursor front;  // of a tile's first chunk
  wait_for(&barriers.kept, 0);
  // Sums of a plane of a tile. `done` has them, behind what it needs of place().
  auto const multiply_plane = [&](Parts const& part, int tile, int plane, auto const& done) {
    device::RingCursor cursor = front;
    float sums[Traits::kSums];
    uint64_t input = input0 + (uint32_t(cursor.stage * p.stage_bytes) >> 4);
    uint64_t filter = filter0 + uint32_t(plane * p.steps) * kRound;
    // A group by itself of each round's products. The first leaves the sums; in a loop with the
    // others, which add to them, registers would have them beside all outputs, too.
    auto const multiply = [&](auto starts) {
      cute::warpgroup_arrive();
      constexpr auto kAll = std::make_integer_sequence<int, kProducts>{};
      multiply_round<Traits, decltype(starts)::value>(input, filter, sums, kAll);
      cute::warpgroup_commit_batch();
      if (plane == 0) return;
      cute::warpgroup_arrive();
      multiply_round<Traits, false>(input + kInputPlane, filter + kRound, sums, kAll);
      cute::warpgroup_commit_batch();
    };
    int behind = -1;  // the stage of the chunk before, if products in flight read it
    device::sync_threads(turn_of(self), kBoth);
    wait_for(&barriers.full[cursor.stage], cursor.parity);
    multiply(std::true_type{});
    if (p.steps == 1) pass_turn();
#pragma unroll 1
    for (int step = 1; step < p.steps; ++step) {
      input += kInputStep;
      filter += kRound << plane;
      if (step % kChunkSteps == 0) {
        behind = cursor.stage;
        cursor.advance(p.stages);
        input = input0 + (uint32_t(cursor.stage * p.stage_bytes) >> 4);
        wait_for(&barriers.full[cursor.stage], cursor.parity);
      }
      if (step + 1 == p.steps) pass_turn();
      multiply(std::false_type{});
      cute::warpgroup_wait<1>();
      if (behind >= 0) release(behind);
      behind = -1;
    }
    outputs.place(part.sample, Origin(p, tile), plane);
    cute::warpgroup_wait<0>();
#pragma unroll
    for (float& sum : sums) cute::warpgroup_fence_operand(sum);
    release(cursor.stage);
    done(sums);
  };
  Parts part(p);
  if constexpr (kDoes == Does::kFinishes) {
    // Parts are tiles.
    int reached = 0;
#pragma unroll 1
    for (int item = self;; item += kConsumers) {
      int const ahead = item / kPlanes - reached;
      part.advance(p, ahead);
      if (!part.present()) return;
      front.skip(ahead * p.chunks, p.stages);
      reached += ahead;
      outputs.set_affine(part.sample);
      multiply_plane(part, part.first_tile, item % kPlanes,
                     [&](auto const& sums) { outputs.finish(sums); });
    }
  } else {
    int which = self;  // of the part's planes, its next one
    for (; part.present(); part.advance(p)) {
      // Moments are left by which its first one is: it depends on parts in front who has which.
      int const first = which, tiles = part.end_tile - part.first_tile;
      int reached = 0;
      outputs.begin_moments();
#pragma unroll 1
      for (; which < tiles * kPlanes; which += kConsumers) {
        int const tile = which / kPlanes;
        front.skip((tile - reached) * p.chunks, p.stages);
        reached = tile;
        multiply_plane(part, part.first_tile + tile, which % kPlanes,
                       [&](auto const& sums) { outputs.add_moments(sums, which == first); });
      }
      which -= tiles * kPlanes;
      front.skip((tiles - reached) * p.chunks, p.stages);
      outputs.leave_moments(part.sample, part.part, first);
    }
  }
}

template <class Traits, Does kDoes>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    convolve(__grid_constant__ Params const p, __grid_constant__ CUtensorMap const map) {
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& barriers = *reinterpret_cast<Barriers*>(shared + p.barriers_offset);
  if (threadIdx.x == 0) {
    device::init_barrier(&barriers.kept, 1);
    for (int i = 0; i < p.stages; ++i) {
      device::init_barrier(&barriers.full[i], 1);
      device::init_barrier(&barriers.empty[i], kWarps * Traits::kPlanes);
    }
    device::fence_barrier_init();
  }
  __syncthreads();
  // Uniform, as the compiler sees it too: it would serialise products that might diverge.
  int const role = __reduce_max_sync(~0u, int(threadIdx.x) / kWarpgroup);
  if (role == Traits::kConsumers) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kCopyRegisters>();
    if (threadIdx.x / 32 % kWarps == 0 && cute::elect_one_sync()) {
      copy_all(p, map, barriers, shared);
    }
    return;
  }
  cutlass::arch::warpgroup_reg_alloc<Traits::kRegisters>();
  consume<Traits, kDoes>(p, barriers, shared, role);
}

}  // namespace fusedconv::conv::sm90::phases
