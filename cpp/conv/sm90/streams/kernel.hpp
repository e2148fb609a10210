// The kernel; schedule.hpp says what it computes and how.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <utility>

#include "conv/sm90/boxes/operand.hpp"
#include "conv/sm90/line_tiles.hpp"
#include "conv/sm90/streams/outputs.hpp"
#include "conv/sm90/streams/params.hpp"
#include "conv/sm90/streams/traits.hpp"
#include "conv/sm90/wait.hpp"
#include "conv/sm90/wgmma.hpp"
#include "cuda/async.hpp"
#include "cuda/early.hpp"
#include "cute/arch/cluster_sm90.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cutlass/arch/reg_reconfig.h"

namespace fusedconv::conv::sm90::streams {

struct Barriers {
  uint64_t full[kMostStages], empty[kMostStages];
};
static_assert(sizeof(Barriers) <= kBarrierBytes);

// A tile's sample and the position of its first row.
struct Place {
  int sample, position;

  __device__ __forceinline__ Place(Params const& p, LineTiles const& item) {
    int number;
    p.tiles(sample, number, item.tile);
    position = p.first + number * kTile;
  }
};

template <class Traits>
__device__ __forceinline__ void copy_all(Params const& p, CUtensorMap const& map,
                                         Barriers& barriers, unsigned char* shared) {
  constexpr auto kHint = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  constexpr int kFilterBytes = Traits::kShape.filter_bytes();
  constexpr int kStageBytes = Traits::kShape.stage_bytes();
  unsigned char const* const filter =
      p.filter + int64_t(int(blockIdx.x) % p.groups) * p.chunks * kFilterBytes;
  device::wait_for_launch_in_front();  // the filter is packed
  device::RingCursor cursor{.stage = 0, .parity = 1};
  for (LineTiles item(p.groups, p.tile_count); item.present(); item.advance()) {
    Place const at(p, item);
#pragma unroll 1
    for (int chunk = 0; chunk < p.chunks; ++chunk) {
      uint64_t* const full = &barriers.full[cursor.stage];
      unsigned char* const stage = shared + cursor.stage * kStageBytes;
      wait_for(&barriers.empty[cursor.stage], cursor.parity);
      device::arrive_and_expect(full, kStageBytes);
      cute::SM90_TMA_LOAD_5D::copy(&map, full, kHint, stage + kFilterBytes, at.position - kFront, 0,
                                   0, chunk * kChunk, at.sample);
      device::bulk_load(device::shared_address(stage), filter + int64_t(chunk) * kFilterBytes,
                        kFilterBytes, full);
      cursor.advance(p.stages);
    }
  }
}

// A lane's rows for one instruction of each tap: two positions of two channels. Tap 0 is of the
// position itself, tap 1 of the one before.
using Operands = uint32_t[kTaps][4];

// line: of the lane's first channel in shared memory, at its first row's position.
__device__ __forceinline__ void load(Operands& operands, uint32_t line) {
  constexpr int kPositions = 8 * 4, kChannels = 4 * kPitch * 4;  // bytes to the second of each
#pragma unroll
  for (int tap = 0; tap < kTaps; ++tap) {
    uint32_t const at = line - tap * 4;
    operands[tap][0] = device::load_word(at);
    operands[tap][1] = device::load_word(at + kPositions);
    operands[tap][2] = device::load_word(at + kChannels);
    operands[tap][3] = device::load_word(at + kChannels + kPositions);
  }
}

template <class Traits>
__device__ __forceinline__ void multiply_step(Operands const& operands, uint64_t filter,
                                              float (&sums)[Traits::kSums]) {
  using Indices = std::make_integer_sequence<int, Traits::kSums>;
  constexpr uint32_t kTapUnits = Traits::kShape.filter_bytes() / kTaps >> 4;
  cute::warpgroup_arrive();
#pragma unroll
  for (int tap = 0; tap < kTaps; ++tap) {
    multiply<typename Traits::Mma>(operands[tap], filter + tap * kTapUnits, sums,
                                   gmma::ScaleOut::One, Indices{});
  }
  cute::warpgroup_commit_batch();
}

template <class Traits>
__device__ __forceinline__ void consume(Params const& p, Barriers& barriers, unsigned char* shared,
                                        Columns<Traits::kShape.columns>& columns, int self) {
  constexpr int kColumns = Traits::kShape.columns;
  constexpr uint32_t kStageBytes = Traits::kShape.stage_bytes();
  constexpr uint32_t kStepUnits = kStep / kVector * kColumns;  // of 16 bytes
  static_assert(kChunk == 2 * kStep, "both sets of operands in turn");
  uint32_t const base = device::shared_address(shared);
  uint64_t const filter0 =
      boxes::operand(base, gmma::LayoutType::INTERLEAVE, kColumns * 16, 8 * 16);
  Lane const lane(self);
  uint32_t const line0 =
      base + Traits::kShape.filter_bytes() + (lane.quarter * kPitch + kFront + lane.row) * 4;
  auto const line_of = [&](int stage, int step) {
    return line0 + stage * kStageBytes + step * (kStep * kPitch * 4);
  };
  auto const release = [&](int stage) {
    if (cute::elect_one_sync()) device::arrive(&barriers.empty[stage]);
  };
  leave_columns(p, columns, self);
  device::RingCursor cursor;
  Operands even, odd;  // of a stage's two steps
  // Stores go out in parts of so many eights, beside the next tile's products where registers hold
  // both: all at once they would be waited for.
  constexpr int kPart = 2, kParts = Traits::kDeferred / kPart;
  constexpr int kNow = Traits::kEights - Traits::kDeferred;
  float results[Traits::kDeferred * 4];
  float* waiting = nullptr;  // where they go: position 0 of the lane's first row in a sample
  auto const store_part = [&](int part) {
    if (waiting == nullptr) return;
    dispatch_part<0, kParts>(part, [&](auto known) {
      store_eights<kNow + known.value * kPart, kPart, kNow>(p, lane, columns, waiting, results);
    });
  };
  LineTiles item(p.groups, p.tile_count);
  // There are at most as many blocks of a group as tiles.
  wait_for(&barriers.full[0], 0);
  load(even, line_of(0, 0));
  // Once more behind the last tile, for its results that are not stored yet.
  for (;; item.advance()) {
    int const chunks = item.present() ? p.chunks : 0;
    float sums[Traits::kSums];
#pragma unroll
    for (float& sum : sums) sum = 0.0f;
    int in_flight = -1;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      uint64_t const filter = filter0 + (uint32_t(cursor.stage) * kStageBytes >> 4);
      multiply_step<Traits>(even, filter, sums);
      store_part(chunk);  // products of two steps are under way, of a tile's first one
      // The other operands are free once all products but the latest are through.
      cute::warpgroup_wait<1>();
      if (in_flight >= 0) release(in_flight);
      load(odd, line_of(cursor.stage, 1));
      multiply_step<Traits>(odd, filter + kStepUnits, sums);
      cute::warpgroup_wait<1>();
      in_flight = cursor.stage;
      cursor.advance(p.stages);
      // Behind all tiles what is loaded is of no use, but operands that a branch defines would make
      // ptxas serialise.
      if (chunk + 1 < p.chunks || !item.last()) {
        wait_for(&barriers.full[cursor.stage], cursor.parity);
      }
      load(even, line_of(cursor.stage, 0));
    }
    cute::warpgroup_wait<0>();
#pragma unroll
    for (float& sum : sums) cute::warpgroup_fence_operand(sum);
#pragma unroll 1
    for (int part = chunks; part < kParts; ++part) store_part(part);
    if (!item.present()) return;
    release(in_flight);
    Place const at(p, item);
    float* const sample = p.output + int64_t(at.sample) * p.output_channels * p.output_length;
    finish(p, lane, columns, sums);
    waiting = nullptr;
    if (is_whole(p, at.position)) {
      waiting = sample + (at.position + lane.row) * p.stride.divisor;
      store_eights<0, kNow, 0>(p, lane, columns, waiting, sums);
#pragma unroll
      for (int i = 0; i < Traits::kDeferred * 4; ++i) results[i] = sums[kNow * 4 + i];
    } else {
      store_present(p, lane, columns, sample, at.position + lane.row, sums);
    }
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    convolve(__grid_constant__ Params const p, __grid_constant__ CUtensorMap const map) {
  extern __shared__ __align__(1024) unsigned char shared[];
  unsigned char* const behind = shared + p.stages * Traits::kShape.stage_bytes();
  auto& barriers = *reinterpret_cast<Barriers*>(behind);
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.stages; ++i) {
      device::init_barrier(&barriers.full[i], 1);
      device::init_barrier(&barriers.empty[i], kConsumers * kWarps);
    }
    device::fence_barrier_init();
  }
  __syncthreads();
  // Uniform, as the compiler sees it too: it would serialise products that might diverge.
  int const role = __reduce_max_sync(~0u, int(threadIdx.x) / kWarpgroup);
  if (role == kConsumers) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kCopyRegisters>();
    if (threadIdx.x / 32 % kWarps == 0 && cute::elect_one_sync()) {
      copy_all<Traits>(p, map, barriers, shared);
    }
    return;
  }
  cutlass::arch::warpgroup_reg_alloc<Traits::kRegisters>();
  consume<Traits>(p, barriers, shared,
                  *reinterpret_cast<Columns<Traits::kShape.columns>*>(behind + kBarrierBytes),
                  role);
}

}  // namespace fusedconv::conv::sm90::streams
