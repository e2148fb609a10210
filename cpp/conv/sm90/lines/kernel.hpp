// The kernel; schedule.hpp says what it computes and how.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <utility>

#include "conv/sm90/boxes/operand.hpp"
#include "conv/sm90/line_tiles.hpp"
#include "conv/sm90/lines/outputs.hpp"
#include "conv/sm90/lines/params.hpp"
#include "conv/sm90/wait.hpp"
#include "cuda/async.hpp"
#include "cuda/early.hpp"
#include "cute/arch/cluster_sm90.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cutlass/arch/reg_reconfig.h"

namespace fusedconv::conv::sm90::lines {

using boxes::operand;
namespace gmma = boxes::gmma;

inline constexpr int kWarpgroup = 128;
inline constexpr int kWarps = kWarpgroup / 32;

struct Maps {
  CUtensorMap input;   // lines of a chunk's channels
  CUtensorMap filter;  // rows of a chunk of channels
};

struct Barriers {
  uint64_t kept;
  uint64_t full[kMostStages], empty[kMostStages];
};
static_assert(sizeof(Barriers) <= kBarrierBytes);

template <Math kMath_, Shape kShape_>
struct Traits {
  static constexpr Math kMath = kMath_;
  static constexpr Shape kShape = kShape_;
  static constexpr int kConsumers = kShape.consumers;
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
  using Own = boxes::Instruction<kMath, kColumns, gmma::Major::K, gmma::Major::MN>;
  using Element = typename Own::Element;
  using Mma = typename Own::Mma;
  // Registers of a thread that multiplies, and of one that copies.
  static constexpr int kRegisters = kConsumers == 3 ? 160 : 232;
  static constexpr int kCopyRegisters = kConsumers == 3 ? 32 : 40;
  static_assert((kConsumers * kRegisters + kCopyRegisters) * kWarpgroup <= 65536);
};

// Rows of each consumer's taps by chunks.
__device__ __forceinline__ int kept_tile(Params const& p, int row_block, int tap, int chunk) {
  return ((row_block * kTaps + tap) * p.chunks + chunk) * kTileBytes;
}

__device__ __forceinline__ void copy_all(Params const& p, Maps const& maps, Barriers& barriers,
                                         unsigned char* shared) {
  constexpr auto kStays = uint64_t(cute::TMA::CacheHintSm90::EVICT_LAST);
  constexpr auto kHint = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  int const group = int(blockIdx.x) % p.groups;
  device::wait_for_launch_in_front();  // the filter is packed
  device::arrive_and_expect(&barriers.kept, uint32_t(p.kept_bytes));
#pragma unroll 1
  for (int rows = 0; rows < p.together * kTaps; ++rows) {
#pragma unroll 1
    for (int chunk = 0; chunk < p.chunks; ++chunk) {
      cute::SM90_TMA_LOAD_5D::copy(&maps.filter, &barriers.kept, kStays,
                                   shared + kept_tile(p, rows / kTaps, rows % kTaps, chunk),
                                   chunk * kChunk, (group * p.together * kTaps + rows) * kRows, 0,
                                   0, 0);
    }
  }
  device::RingCursor cursor{.stage = 0, .parity = 1};
  for (LineTiles item(p.groups, p.tile_count); item.present(); item.advance()) {
    int sample, number;
    p.tiles(sample, number, item.tile);
    int const first = p.first + number * kOutputs;
#pragma unroll 1
    for (int chunk = 0; chunk < p.chunks; ++chunk) {
      uint64_t* const full = &barriers.full[cursor.stage];
      unsigned char* const stage = shared + p.kept_bytes + cursor.stage * kStageBytes;
      wait_for(&barriers.empty[cursor.stage], cursor.parity);
      device::arrive_and_expect(full, kStageBytes);
#pragma unroll
      for (int line = 0; line < kColumns / kLine; ++line) {
        cute::SM90_TMA_LOAD_5D::copy(&maps.input, full, kHint, stage + line * kTileBytes,
                                     first + line * kLine, 0, 0, chunk * kChunk, sample);
      }
      cursor.advance(p.stages);
    }
  }
}

template <class Traits>
__device__ __forceinline__ void consume(Params const& p, Barriers& barriers, unsigned char* shared,
                                        int self) {
  using Element = typename Traits::Element;
  using Indices = std::make_integer_sequence<int, kSums>;
  constexpr uint32_t kFilterStep = 32 >> 4, kLineStep = 16 * kLineBytes >> 4;
  constexpr int kEightRows = 8 * kLineBytes;
  // Consumers have the same tiles, and rows of their own, or the other way round.
  bool const shares = p.together > 1;
  int const row_block = shares ? self : 0, own_tile = shares ? 0 : self;
  int const others = shares ? 0 : Traits::kConsumers - 1;
  uint32_t const base = device::shared_address(shared);
  uint64_t const center0 =
      operand(base + kept_tile(p, row_block, 0, 0), gmma::LayoutType::B128, 0, kEightRows);
  uint32_t const to_side = uint32_t(p.chunks * kTileBytes) >> 4;
  uint64_t const lines0 =
      operand(base + p.kept_bytes, gmma::LayoutType::B128, kTileBytes, kEightRows);
  Lane const lane(p, int(blockIdx.x) % p.groups * p.together + row_block);
  ChannelValues const values = channel_values<Element>(p, lane);
  auto const release = [&](int stage) {
    if (cute::elect_one_sync()) device::arrive(&barriers.empty[stage]);
  };
  // Who takes turns begins with products once the one before has found its stages full: so one's
  // outputs are finished beside another's products, and nobody waits for a use of a stage that is
  // two on, which a barrier's parity does not tell apart. Who shares a tile with others must not
  // keep them from stages that all have to leave.
  int const pass_behind = shares ? min(p.chunks, p.stages - 1) - 1 : p.chunks - 1;
  auto const turn_of = [](int index) { return 1 + index; };
  constexpr int kBoth = 2 * kWarpgroup;
  int const next = self + 1 < Traits::kConsumers ? self + 1 : 0;
  auto const pass_turn = [&] { device::arrive_threads(turn_of(next), kBoth); };
  if (next == 0) pass_turn();
  device::RingCursor cursor;
  LineTiles item(p.groups, p.tile_count);
  item.advance(own_tile);
  cursor.jump(own_tile * p.chunks, p.stages);
  wait_for(&barriers.kept, 0);
  for (; item.present(); item.advance(others + 1)) {
    float center[kSums], side[kSums];
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      center[i] = values.start;
      side[i] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      cute::warpgroup_fence_operand(center[i]);
      cute::warpgroup_fence_operand(side[i]);
    }
    int in_flight = -1;
    uint64_t filter = center0;
    device::sync_threads(turn_of(self), kBoth);
#pragma unroll 1
    for (int chunk = 0; chunk < p.chunks; ++chunk) {
      uint64_t const lines = lines0 + (uint32_t(cursor.stage * kStageBytes) >> 4);
      wait_for(&barriers.full[cursor.stage], cursor.parity);
      if (chunk == pass_behind) pass_turn();
      cute::warpgroup_arrive();
#pragma unroll
      for (int step = 0; step < kChunk / 16; ++step) {
        uint64_t const a = filter + step * kFilterStep, b = lines + step * kLineStep;
        boxes::multiply<typename Traits::Mma>(a, b, center, Indices{});
        boxes::multiply<typename Traits::Mma>(a + to_side, b, side, Indices{});
      }
      cute::warpgroup_commit_batch();
      cute::warpgroup_wait<1>();
      if (in_flight >= 0) release(in_flight);
      in_flight = cursor.stage;
      cursor.advance(p.stages);
      filter += kTileBytes >> 4;
    }
    cute::warpgroup_wait<0>();
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      cute::warpgroup_fence_operand(center[i]);
      cute::warpgroup_fence_operand(side[i]);
    }
    release(in_flight);
    cursor.jump(others * p.chunks, p.stages);
    int sample, number;
    p.tiles(sample, number, item.tile);
    auto* const output =
        static_cast<Element*>(p.output) + int64_t(sample) * p.output_channels * p.output_length;
    store_outputs(p, lane, values, output, p.first + number * kOutputs, center, side);
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    convolve(__grid_constant__ Params const p, __grid_constant__ Maps const maps) {
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& barriers = *reinterpret_cast<Barriers*>(shared + p.kept_bytes + p.ring_bytes);
  if (threadIdx.x == 0) {
    device::init_barrier(&barriers.kept, 1);
    for (int i = 0; i < p.stages; ++i) {
      device::init_barrier(&barriers.full[i], 1);
      device::init_barrier(&barriers.empty[i], p.together * kWarps);
    }
    device::fence_barrier_init();
  }
  __syncthreads();
  // Uniform, as the compiler sees it too: it would serialise products that might diverge.
  int const role = __reduce_max_sync(~0u, int(threadIdx.x) / kWarpgroup);
  if (role == Traits::kConsumers) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kCopyRegisters>();
    if (threadIdx.x / 32 % kWarps == 0 && cute::elect_one_sync()) {
      copy_all(p, maps, barriers, shared);
    }
    return;
  }
  cutlass::arch::warpgroup_reg_alloc<Traits::kRegisters>();
  consume<Traits>(p, barriers, shared, role);
}

}  // namespace fusedconv::conv::sm90::lines
