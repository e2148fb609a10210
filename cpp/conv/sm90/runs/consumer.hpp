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
#include "conv/sm90/runs/operand.hpp"
#include "conv/sm90/runs/params.hpp"
#include "conv/sm90/runs/traits.hpp"
#include "cuda/async.hpp"

namespace fusedconv::conv::sm90::runs {

template <class Mma, int... kIndex>
__device__ __forceinline__ void multiply(uint32_t const (&a)[4], uint64_t b,
                                         float (&sum)[sizeof...(kIndex)],
                                         std::integer_sequence<int, kIndex...>) {
  Mma::fma(a[0], a[1], a[2], a[3], b, sum[kIndex]..., gmma::ScaleOut::One);
}

// In a register: the compiler would read it from the parameters again wherever it is used, with an
// index that is not known before.
__device__ __forceinline__ int kept(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

template <class Traits>
__device__ __forceinline__ void consume(Params const& p, Header& header, uint32_t filter,
                                        uint32_t ring, float* moments, int consumer, int channel0) {
  using Mma = typename Traits::Mma;
  using Indices = std::make_integer_sequence<int, kAccumulators>;
  constexpr int kTaps = Traits::kWindow.size();
  // Groups of products in flight while the next step's operands replace the previous step's.
  constexpr int kAhead = kTaps > 1 ? kTaps - 1 : 1;
  using Operands = Run<Traits::kElementBytes, Traits::kWindow.before, Traits::kWindow.after>;
  Barriers& barriers = header.barriers;
  int const lane = threadIdx.x % 32;
  int const warp = __reduce_max_sync(~0u, threadIdx.x % kWarpgroupThreads / 32);
  int const quad = warp * 8 + lane / 4;
  int const channel = lane % 4 * 2;
  uint64_t const first_tap = filter_operand(filter);
  uint32_t const tap_high = uint32_t(first_tap >> 32);
  int const steps = p.k_iterations * p.filter_rows;
  device::RingCursor cursor;
  wait_for(&barriers.filter, 0);

  while (true) {
    float sums[kRowTiles][kAccumulators];
#pragma unroll
    for (auto& row_tile : sums) {
#pragma unroll
      for (float& value : row_tile) value = 0.0f;
    }
    wait_for(&barriers.full[consumer][cursor.stage], cursor.parity);
    int const index = __reduce_max_sync(
        ~0u, *static_cast<int const volatile*>(&barriers.tile[consumer][cursor.stage]));
    if (index == kNoTile) return;
    Tile const tile(p.raster, index);
    Raster::Shape const& shape = p.raster.shapes[tile.shape];
    int const pitch = kept(shape.pitch);
    int row, column;
    shape.quads(row, column, quad);
    column *= kQuad;
    uint32_t const own = ring + min(row, shape.rows - 1) * shape.line_bytes + channel * pitch +
                         (column + shape.lead) * Traits::kElementBytes;
    int const row_step = kept(p.dilation_h * shape.line_bytes);

    uint32_t operands[2][Operands::kRegisters][4];
    Operands loaded;
    uint32_t tap = uint32_t(first_tap);
    int filter_row = 0;
    uint32_t line = own + cursor.stage * p.stage_bytes;
    loaded.load(line, pitch, 0);
    loaded.put(operands[0], 0);
    loaded.load(line, pitch, 1);
    loaded.put(operands[0], 1);
    auto const step = [&](auto which, bool more) {
      constexpr int kSet = decltype(which)::value;
      if (++filter_row == p.filter_rows) {
        // The stage's loads are through.
        filter_row = 0;
        __syncwarp();
        if (lane == 0) device::arrive(&barriers.empty[consumer][cursor.stage]);
        cursor.advance(p.stages);
        if (more) {
          wait_for(&barriers.full[consumer][cursor.stage], cursor.parity);
          line = own + cursor.stage * p.stage_bytes;
        }
      } else {
        line += row_step;
      }
      // Loads behind the last step are for nothing, but branches would make ptxas serialise.
      loaded.load(line, pitch, 0);
      auto const multiply_tap = [&](int t) {
        cute::warpgroup_arrive();
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          multiply<Mma>(operands[kSet][i + t],
                        uint64_t(tap_high) << 32 | (tap + t * (kTapBytes >> 4)), sums[i],
                        Indices{});
        }
        cute::warpgroup_commit_batch();
      };
#pragma unroll
      for (int t = 0; t < kAhead; ++t) multiply_tap(t);
      cute::warpgroup_wait<kAhead>();
      loaded.put(operands[kSet ^ 1], 0);
      loaded.load(line, pitch, 1);
#pragma unroll
      for (int t = kAhead; t < kTaps; ++t) multiply_tap(t);
      loaded.put(operands[kSet ^ 1], 1);
      tap += kTaps * (kTapBytes >> 4);
    };
#pragma unroll 1
    for (int i = 2; i <= steps; i += 2) {
      step(std::integral_constant<int, 0>{}, true);
      step(std::integral_constant<int, 1>{}, i < steps);
    }
    cute::warpgroup_wait<0>();
#pragma unroll
    for (auto& row_tile : sums) {
#pragma unroll
      for (float& value : row_tile) cute::warpgroup_fence_operand(value);
    }
    OwnQuad const quad_pixels(p, tile, row, column);
    finish_tile<Traits>(p, sums, tile, index, channel0, quad_pixels, header.bias, moments,
                        1 + consumer);
  }
}

}  // namespace fusedconv::conv::sm90::runs
