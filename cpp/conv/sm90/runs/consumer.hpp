// A warpgroup that multiplies and finishes tiles. Of a tile:
// 1. A step is a filter row of a stage: the lines that the row reads are in registers already, and
//    while their products with the row's taps run, those of the next step are loaded.
// 2. The epilogue runs under the other warpgroups' products.
//
// Instructions on float32 in the epilogue take issue slots from the tensor cores, most others do
// not (measured): what the epilogue costs is its additions and products.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "conv/sm90/runs/epilogue.hpp"
#include "conv/sm90/runs/interleave.hpp"
#include "conv/sm90/runs/operand.hpp"
#include "conv/sm90/runs/params.hpp"
#include "conv/sm90/runs/traits.hpp"
#include "conv/sm90/wgmma.hpp"
#include "cuda/async.hpp"

namespace fusedconv::conv::sm90::runs {

// In a register: the compiler would read it from the parameters again wherever it is used, with an
// index that is not known before.
__device__ __forceinline__ int kept(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

inline constexpr int kNoStage = -1;

// By a tap so many columns from a position's own, which before it only the lower half of the
// block's columns have, and behind it the upper. Halves one by one even where both have it: ptxas
// serialises products of two shapes with the same accumulators.
template <class Traits>
__device__ __forceinline__ void multiply_columns(uint32_t const (&positions)[4], uint64_t tap,
                                                 float (&sums)[kAccumulators], int delta) {
  using Mma = typename Traits::HalfMma;
  using Half = std::make_integer_sequence<int, kAccumulators / 2>;
  constexpr uint32_t kHalfUnits = kBlockN / 2;  // of 16 bytes, one for each column
  if (delta <= 0) multiply_part<Mma, 0>(positions, tap, sums, Half{});
  if (delta >= 0) {
    multiply_part<Mma, kAccumulators / 2>(positions, tap + kHalfUnits, sums, Half{});
  }
}

template <class Traits>
__device__ __forceinline__ void consume(Params const& p, Header& header, Memory const& memory,
                                        float* moments, int consumer,
                                        Block<Traits::kOwnTaps> const& block) {
  using Mma = typename Traits::Mma;
  using Indices = std::make_integer_sequence<int, kAccumulators>;
  constexpr int kConsumers = Traits::kConsumers;
  constexpr int kParts = Traits::kSplits ? 2 : 1;
  constexpr int kTaps = Traits::kWindow.size();
  // Groups of products in flight while the next step's operands replace the previous step's.
  constexpr int kAhead = kTaps > 1 ? kTaps - 1 : 1;
  using Operands = Run<Traits::kElementBytes, Traits::kWindow.before, Traits::kWindow.after>;
  static_assert(Operands::kStaggers == Traits::kStaggers, "what sets the operands' order");
  // A shared ring has one set of barriers.
  int const ring = p.streams_filter ? 0 : consumer;
  uint64_t* const full = header.barriers.full[ring];
  uint64_t* const empty = header.barriers.empty[ring];
  int const volatile* const turns = header.barriers.turn[ring];
  int const lane = threadIdx.x % 32;
  int const warp = __reduce_max_sync(~0u, threadIdx.x % kWarpgroupThreads / 32);
  int const quad = warp * 8 + lane / 4;
  int const channel = lane % 4 * 2;
  uint64_t const first_tap = filter_operand(memory.filter);
  uint32_t const tap_high = uint32_t(first_tap >> 32);
  // In the descriptor's units.
  uint32_t const tap_stride = p.streams_filter ? uint32_t(memory.stage_stride) >> 4 : 0;
  // From a tap's big part to its small one.
  uint32_t const small = Traits::kSplits ? uint32_t(p.filter_stage_bytes) / 2 >> 4 : 0;
  int const steps = block.k_iterations() * block.filter_rows();
  device::RingCursor cursor;
  if (!p.streams_filter) wait_for(&header.barriers.filter, 0);

  while (true) {
    // Tells ptxas that the lanes are together: else it may take what a loop of theirs counts for
    // different, and move it to uniform registers for each product.
    __syncwarp();
    float sums[kRowTiles][kAccumulators];
#pragma unroll
    for (auto& row_tile : sums) {
#pragma unroll
      for (float& value : row_tile) value = 0.0f;
    }
    wait_for(&full[cursor.stage], cursor.parity);
    // The lane that reads it is the one that releases the stage.
    int const turn = __reduce_max_sync(~0u, lane == 0 ? turns[cursor.stage] : kNoTurn);
    if (turn == kNoTurn) return;
    // Beyond the last tile of a shared stage the last is computed once more, for nothing.
    int const own_index = p.streams_filter ? turn * kConsumers + consumer : turn;
    int const index = min(own_index, p.tile_count - 1);
    Tile const tile(p.raster, index);
    Raster::Shape const& shape = p.raster.shapes[tile.shape];
    int const pitch = kept(shape.pitch);
    int row, column;
    shape.quads(row, column, tile.quad0 + quad);
    // Quads beyond the tile's read some line, to no effect.
    int const line_in_box =
        min(row - tile.row0, shape.lines - 1 - p.dilation_h * (block.filter_rows() - 1));
    int first_column = column * kQuad + shape.lead;
    Operands loaded;
    if constexpr (Traits::kStaggers) {
      loaded.stagger.set(p.raster.stagger(tile.slice, row) > 0);
      first_column += loaded.stagger.whole();
    }
    uint32_t const own = memory.box + line_in_box * shape.line_bytes + channel * pitch +
                         first_column * Traits::kElementBytes;
    int const row_step = kept(p.dilation_h * shape.line_bytes);

    uint32_t operands[2][kParts][Operands::kRegisters][4];
    auto const put = [&](auto& set, int half) {
      if constexpr (Traits::kSplits) {
        loaded.split(set[0], set[1], half);
      } else {
        loaded.put(set[0], half);
      }
    };
    uint32_t tap = uint32_t(first_tap) + cursor.stage * tap_stride;
    int filter_row = 0;
    int ended = kNoStage;  // whose products are under way
    uint32_t line = own + cursor.stage * memory.stage_stride;
    auto const load_next = [&](auto& set) {
      loaded.load(line, pitch, 0);
      put(set, 0);
      loaded.load(line, pitch, 1);
      put(set, 1);
    };
    load_next(operands[0]);
    auto const release = [&](int stage) {
      if (stage != kNoStage && lane == 0) device::arrive(&empty[stage]);
    };
    auto const at = [&](uint32_t units) { return uint64_t(tap_high) << 32 | (tap + units); };
    uint32_t next_tap = tap;
    // Turns to the next step's line and taps, but not from the present step's.
    auto const turn_to_next = [&](bool more) {
      next_tap = tap + kTaps * (kTapBytes >> 4);
      ended = kNoStage;
      if (++filter_row == block.filter_rows()) {
        // The stage's loads are through, but not the products with its part of the filter.
        filter_row = 0;
        next_tap += small;
        __syncwarp();
        if (p.streams_filter) {
          ended = cursor.stage;
        } else if (lane == 0) {
          device::arrive(&empty[cursor.stage]);
        }
        cursor.advance(p.stages);
        if (p.streams_filter) next_tap = uint32_t(first_tap) + cursor.stage * tap_stride;
        if (more) {
          wait_for(&full[cursor.stage], cursor.parity);
          line = own + cursor.stage * memory.stage_stride;
        }
      } else {
        line += row_step;
      }
    };
    auto const step = [&](auto which, bool more) {
      constexpr int kSet = decltype(which)::value;
      int const through = ended;
      turn_to_next(more);
      // Loads behind the last step are for nothing, but branches would make ptxas serialise.
      loaded.load(line, pitch, 0);
      auto const multiply_tap = [&](int t) {
        cute::warpgroup_arrive();
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          uint32_t const units = t * (kTapBytes >> 4);
          if constexpr (Traits::kOwnTaps) {
            multiply_columns<Traits>(operands[kSet][0][i + t], at(units), sums[i],
                                     t - Traits::kWindow.before);
          } else {
            multiply<Mma>(operands[kSet][0][i + t], at(units), sums[i], gmma::ScaleOut::One,
                          Indices{});
          }
        }
        cute::warpgroup_commit_batch();
      };
#pragma unroll
      for (int t = 0; t < kAhead; ++t) multiply_tap(t);
      cute::warpgroup_wait<kAhead>();
      release(through);
      put(operands[kSet ^ 1], 0);
      loaded.load(line, pitch, 1);
#pragma unroll
      for (int t = kAhead; t < kTaps; ++t) multiply_tap(t);
      put(operands[kSet ^ 1], 1);
      tap = next_tap;
    };
    // The tensor core drops bits in every addition to an accumulator, which a long sum would show.
    // So a filter row is summed by itself, the small products first, and added with rounding: that
    // of one row tile while the other's products run.
    [[maybe_unused]] float rows[kRowTiles][kAccumulators];
    [[maybe_unused]] auto const multiply_row = [&](auto which, auto row_tile) {
      auto const& set = operands[which.value];
      constexpr int i = decltype(row_tile)::value;
      cute::warpgroup_arrive();
#pragma unroll
      for (int t = 0; t < kTaps; ++t) {
        uint32_t const units = t * (kTapBytes >> 4);
        multiply<Mma>(set[kParts - 1][i + t], at(units), rows[i],
                      t > 0 ? gmma::ScaleOut::One : gmma::ScaleOut::Zero, Indices{});
        multiply<Mma>(set[0][i + t], at(units + small), rows[i], gmma::ScaleOut::One, Indices{});
      }
#pragma unroll
      for (int t = 0; t < kTaps; ++t) {
        multiply<Mma>(set[0][i + t], at(t * (kTapBytes >> 4)), rows[i], gmma::ScaleOut::One,
                      Indices{});
      }
      cute::warpgroup_commit_batch();
    };
    [[maybe_unused]] auto const add_row = [&](auto row_tile) {
      constexpr int i = decltype(row_tile)::value;
#pragma unroll
      for (int a = 0; a < kAccumulators; ++a) {
        cute::warpgroup_fence_operand(rows[i][a]);
        sums[i][a] += rows[i][a];
      }
    };
    using First = std::integral_constant<int, 0>;
    using Second = std::integral_constant<int, 1>;
    // Products in flight where the loop returns would make ptxas serialise.
    [[maybe_unused]] auto const split_steps = [&](bool more) {
      multiply_row(First{}, First{});
      multiply_row(First{}, Second{});
      turn_to_next(true);
      load_next(operands[1]);
      tap = next_tap;
      cute::warpgroup_wait<1>();
      add_row(First{});
      multiply_row(Second{}, First{});
      cute::warpgroup_wait<1>();
      add_row(Second{});
      release(ended);
      multiply_row(Second{}, Second{});
      turn_to_next(more);
      load_next(operands[0]);
      tap = next_tap;
      cute::warpgroup_wait<1>();
      add_row(First{});
      cute::warpgroup_wait<0>();
      add_row(Second{});
      release(ended);
    };
    if constexpr (Traits::kSplits) {
#pragma unroll 1
      for (int i = 2; i <= steps; i += 2) split_steps(i < steps);
    } else {
      int left = steps;
#pragma unroll 1
      do {
        left -= 2;
        step(First{}, true);
        step(Second{}, left > 0);
      } while (left > 0);
      cute::warpgroup_wait<0>();
#pragma unroll
      for (auto& row_tile : sums) {
#pragma unroll
        for (float& value : row_tile) cute::warpgroup_fence_operand(value);
      }
      release(ended);
    }
    if (own_index != index) continue;
    if constexpr (Traits::kInterleaves) {
      interleave_tile<Traits>(p, sums, index, block, OwnPhases(p, tile, quad, row, column),
                              header.bias, moments, 1 + consumer);
    } else {
      OwnQuad const quad_pixels(p, tile, quad, row, column);
      finish_tile<Traits>(p, sums, tile, index, block.channel0, quad_pixels, header.bias, moments,
                          1 + consumer);
    }
  }
}

}  // namespace fusedconv::conv::sm90::runs
