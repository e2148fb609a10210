// The convolution: a warp has kGroupRows output channels of one phase and kWarpPositions positions.
// A step is a tap of each row group for a chunk of channels: its part of the filter comes by
// asynchronous copies, some steps ahead. A stage's box of the input is loaded into registers while
// the stage before is multiplied, and then stored.
#pragma once

#include <cstdint>

#include "conv/mma_sync.hpp"
#include "conv/taps/epilogue.hpp"
#include "conv/taps/loads.hpp"
#include "conv/taps/params.hpp"
#include "conv/taps/traits.hpp"
#include "cuda/async.hpp"
#include "cutlass/arch/memory_sm80.h"

namespace fusedconv::conv::taps {

inline constexpr int kChunkSteps = kChunkBytes / 32;  // of the tensor cores
// Of split products, which float32 additions join: steps of a sum before totals take it. What
// additions round off then grows with the root of both counts, not with that of all steps.
inline constexpr int kSumSteps = 8;

// Copies a block's part of the filter for a step, rows kPitchBytes apart.
template <class Traits>
__device__ __forceinline__ void copy_filter(unsigned char* slot, unsigned char const* step) {
  constexpr int kPiecesOfStep = step_bytes(Traits::kGroups) / 16;
  static_assert(kPiecesOfStep % kThreads == 0);
#pragma unroll
  for (int i = 0; i < kPiecesOfStep / kThreads; ++i) {
    int const piece = int(threadIdx.x) + i * kThreads;
    cutlass::arch::cp_async<16, cutlass::arch::CacheOperation::Global>(
        slot + piece / kPieces * kPitchBytes + piece % kPieces * 16, step + piece * 16);
  }
}

__device__ __forceinline__ void clear(Accumulators& sums) {
#pragma unroll
  for (auto& row : sums) {
#pragma unroll
    for (auto& tile : row) {
#pragma unroll
      for (float& value : tile) value = 0.0f;
    }
  }
}

__device__ __forceinline__ void add(Accumulators& sums, Accumulators const& more) {
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[r][c][e] += more[r][c][e];
    }
  }
}

// Adds a step's products. kAll, of split operands: those of two small parts too, which are next to
// nothing, but of a few products eager's sums in float32 leave no more out.
template <class Traits, bool kAll = false>
__device__ __forceinline__ void multiply(Accumulators& sums, unsigned char const* filter,
                                         unsigned char const* const (&positions)[4]) {
#pragma unroll
  for (int k = 0; k < kChunkSteps; ++k) {
    uint32_t a[kRowTiles][4], small_a[kRowTiles][4];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      load_matrices(a[i], filter + i * 16 * kPitchBytes + k * 32);
      if constexpr (Traits::kSplits) split(a[i], small_a[i]);
    }
#pragma unroll
    for (int j = 0; j < kColumnTiles; j += 2) {
      uint32_t b[4], small_b[4];
      load_matrices(b, positions[j / 2] + k * 32);
      if constexpr (Traits::kSplits) split(b, small_b);
      // To each tile of the pair of columns, so that products in a row wait for none of theirs.
      auto const add = [&](auto const& to, uint32_t const(&x)[kRowTiles][4],
                           uint32_t const(&y)[4]) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float (&sum)[4] = to(i, e);
            Traits::Mma::fma(sum[0], sum[1], sum[2], sum[3], x[i][0], x[i][1], x[i][2], x[i][3],
                             y[2 * e], y[2 * e + 1], sum[0], sum[1], sum[2], sum[3]);
          }
        }
      };
      auto const of_sums = [&](int i, int e) -> float (&)[4] { return sums[i][j + e]; };
      if constexpr (Traits::kSplits) {
        // Tensor cores cut sums off, by a share of their size: a step of theirs has sums of its
        // own, and its small products come first.
        float steps[kRowTiles][2][4] = {};
        auto const of_steps = [&](int i, int e) -> float (&)[4] { return steps[i][e]; };
        if constexpr (kAll) add(of_steps, small_a, small_b);
        add(of_steps, small_a, b);
        add(of_steps, a, small_b);
        add(of_steps, a, b);
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
#pragma unroll
            for (int v = 0; v < 4; ++v) sums[i][j + e][v] += steps[i][e][v];
          }
        }
      } else {
        add(of_sums, a, b);
      }
    }
  }
}

template <class Traits>
__global__ void __launch_bounds__(kThreads, Traits::kBlocks)
    convolve(__grid_constant__ Params const p) {
  constexpr int kGroups = Traits::kGroups;
  extern __shared__ __align__(128) unsigned char shared[];
  int const lane = threadIdx.x % 32;
  int const warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  Block const block(p, blockIdx.x);
  int const first_row_group = block.block_m * kGroups;
  RowPlace const own(p, first_row_group + warp % kGroups);
  TapList const taps(p, first_row_group, kGroups);
  auto* const list = reinterpret_cast<int*>(shared);
  taps.write(p, first_row_group, kGroups, list);

  int const box_bytes = p.box_positions.divisor * kPitchBytes;
  constexpr int kSlotBytes = kGroups * kGroupRows * kPitchBytes;
  unsigned char* const boxes = shared + p.list_bytes;
  unsigned char* const filter_slots = boxes + 2 * box_bytes;
  int64_t const chunk_bytes = int64_t(p.chunk_steps) * step_bytes(kGroups);
  unsigned char const* filter =
      p.filter +
      (int64_t(block.group) * p.blocks_m.divisor + block.block_m) * p.chunks * chunk_bytes;

  // Lanes name the rows of the matrices that they load together.
  int const filter_row = (warp % kGroups * kGroupRows + lane % 16) * kPitchBytes + lane / 16 * 16;
  int positions[kColumnTiles / 2];
#pragma unroll
  for (int i = 0; i < kColumnTiles / 2; ++i) {
    int const position = warp / kGroups * kWarpPositions + i * 16 + lane / 16 * 8 + lane % 8;
    int d, h, w;
    p.tile_w(h, w, position);
    p.tile_h(d, h, h);
    // Positions beyond the tile read some other, to no effect.
    if (d >= p.tile[0]) d = h = w = 0;
    int const at = (d * p.box[1] + h) * p.box[2] + p.lead + w;
    positions[i] = at * kPitchBytes + lane % 16 / 8 * 16;
  }

  Accumulators sums, totals;  // totals where products are split
  clear(sums);
  clear(totals);

  int const total = taps.count * p.chunks;
  if (total > 0) {
    BoxLoader<Traits> loader(p, block);
    int stage_step = 0, stage_chunk = 0;  // which stage is loaded next
    auto const load = [&] {
      loader.load(p, block, taps, stage_chunk, stage_step);
      stage_step += taps.stage_steps;
      if (stage_step == taps.count) {
        stage_step = 0;
        ++stage_chunk;
      }
    };
    load();
    __syncthreads();  // the list is written
    int ahead = 0, ahead_step = 0, ahead_slot = 0;
    auto const copy_ahead = [&] {
      if (ahead < total) {
        copy_filter<Traits>(filter_slots + ahead_slot * kSlotBytes,
                            filter + list[ahead_step * (kGroups + 1)] * step_bytes(kGroups));
        ++ahead;
        if (++ahead_step == taps.count) {
          ahead_step = 0;
          filter += chunk_bytes;
        }
      }
      cutlass::arch::cp_async_fence();
      if (++ahead_slot == kFilterSlots) ahead_slot = 0;
    };
#pragma unroll 1
    for (int i = 0; i < kFilterSlots - 1; ++i) copy_ahead();
    loader.store(p, boxes);
    int const* const own_shifts = list + 1 + warp % kGroups;
    unsigned char const* const own_rows = filter_slots + filter_row;
    int slot = 0, box = 0, step = 0, left_of_stage = 0;
#pragma unroll 1
    for (int i = 0; i < total; ++i) {
      cutlass::arch::cp_async_wait<kFilterSlots - 2>();
      __syncthreads();
      copy_ahead();
      if (left_of_stage == 0) {
        left_of_stage = taps.stage_steps;
        if (stage_chunk < p.chunks) load();
      }
      int const shift = own_shifts[step * (kGroups + 1)];
      if (shift != kNoTap) {
        unsigned char const* const base = boxes + box * box_bytes + shift;
        unsigned char const* const bases[kColumnTiles / 2] = {
            base + positions[0], base + positions[1], base + positions[2], base + positions[3]};
        unsigned char const* const rows = own_rows + slot * kSlotBytes;
        if (Traits::kSplits && total <= kSumSteps) {
          multiply<Traits, true>(sums, rows, bases);
        } else {
          multiply<Traits>(sums, rows, bases);
        }
      }
      if constexpr (Traits::kSplits) {
        if (i % kSumSteps == kSumSteps - 1) {
          add(totals, sums);
          clear(sums);
        }
      }
      if (--left_of_stage == 0) {
        box ^= 1;
        // Nobody reads this box: all are beyond the stage before.
        if (i + 1 < total) loader.store(p, boxes + box * box_bytes);
      }
      if (++step == taps.count) step = 0;
      if (++slot == kFilterSlots) slot = 0;
    }
    cutlass::arch::cp_async_wait<0>();
  }
  if constexpr (Traits::kSplits) add(sums, totals);
  __syncthreads();
  finish<Traits>(p, block, own, warp, sums, shared);
}

}  // namespace fusedconv::conv::taps
