// A warpgroup that multiplies and finishes tiles. Of a tile:
// 1. It reads its channels' bias and, where the two warpgroups take turns, waits for its own.
// 2. For each k-iteration it waits until the stage is full, and multiplies the filter of each tap
//    with the staged positions that start at the tap's distance. A stage is released once the next
//    one's first product has begun, in strict fp32 once its own are through.
// 3. It lets the other warpgroup multiply and runs the epilogue meanwhile.
#pragma once

#include <cstdint>
#include <utility>

#include "conv/sm90/epilogue.hpp"
#include "conv/sm90/params.hpp"
#include "conv/sm90/traits.hpp"
#include "cuda/async.hpp"
#include "cuda/math.hpp"
#include "cute/arch/mma_sm90_desc.hpp"
#include "cute/arch/mma_sm90_gmma.hpp"

namespace fusedconv::conv::sm90 {

// K-major core matrices of 8 rows times 16 bytes without swizzle: rows follow each other at 16
// bytes, so any row may be the first one. plane_pitch: rows from one half of a k-block's channels
// to the other.
__device__ __forceinline__ uint64_t operand(uint32_t address, int plane_pitch) {
  cute::GmmaDescriptor result;
  result.bitfield.start_address_ = uint16_t(address >> 4);
  result.bitfield.leading_byte_offset_ = uint16_t(plane_pitch);
  result.bitfield.stride_byte_offset_ = 8;
  result.bitfield.layout_type_ = uint8_t(gmma::LayoutType::INTERLEAVE);
  return result.desc_;
}

template <class Mma, int... kIndex>
__device__ __forceinline__ void multiply(uint64_t a, uint64_t b, float (&sum)[sizeof...(kIndex)],
                                         bool accumulate, std::integer_sequence<int, kIndex...>) {
  Mma::fma(a, b, sum[kIndex]..., accumulate ? gmma::ScaleOut::One : gmma::ScaleOut::Zero);
}

template <class Traits>
__device__ __forceinline__ void consume(Params const& p, Barriers& barriers, uint32_t filter_ring,
                                        uint32_t input_ring, int warpgroup) {
  using T = typename Traits::Element;
  using Mma = typename Traits::Mma;
  constexpr int kAccumulators = Traits::kAccumulators;
  using Indices = std::make_integer_sequence<int, kAccumulators>;
  constexpr bool kPingPong = Traits::kSharing == Sharing::kPingPong;
  constexpr bool kSharesN = Traits::kSharing == Sharing::kCooperativeM;
  constexpr int kBlockBytes = kBlockM * kKBlockBytes;
  constexpr int kTapBytes = kBlockBytes * Traits::kTile.blocks_m();
  constexpr int kOrderBarrier = 1;  // and the next: the two warpgroups' turns
  int const warp = threadIdx.x % kWarpgroupThreads / 32;
  bool const first_lane = threadIdx.x % 32 == 0;
  // Filter block and positions of this warpgroup within the tile.
  uint32_t const own_filter = kSharesN ? warpgroup * kBlockBytes : 0;
  int const own_positions =
      Traits::kSharing == Sharing::kCooperativeN ? warpgroup * Traits::kBlockN : 0;
  [[maybe_unused]] int const filter_small = p.filter_stage_bytes / 2 >> 4;
  [[maybe_unused]] int const input_small = p.input_stage_bytes / 2 >> 4;
  int const first_tile = kPingPong ? warpgroup : 0;
  if constexpr (kPingPong) wait_for(&barriers.filter, 0);

  device::RingCursor cursor;
  if (kPingPong && warpgroup == 1) {
    cursor.skip(p.k_iterations, p.stages);
    device::arrive_threads(kOrderBarrier, 2 * kWarpgroupThreads);  // the other warpgroup goes first
  }
  float sum[kAccumulators];
  for (int index = blockIdx.x + first_tile * gridDim.x; index < p.tile_count;
       index += (kPingPong ? 2 : 1) * gridDim.x) {
    Tile const tile(p, index);
    int const channel0 =
        (tile.m * Traits::kTile.blocks_m() + (kSharesN ? warpgroup : 0)) * kBlockM + warp * 16;
    float bias[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const channel = channel0 + threadIdx.x % 32 / 4 + 8 * i;
      if (p.bias != nullptr && channel < p.out_channels) {
        bias[i] = device::to_float(static_cast<T const*>(p.bias)[channel]);
      }
    }
    // Only one warpgroup at a time waits for stages: a parity tells two phases apart, not three.
    if constexpr (kPingPong) device::sync_threads(kOrderBarrier + warpgroup, 2 * kWarpgroupThreads);
    [[maybe_unused]] int previous = 0;
    for (int k = 0; k < p.k_iterations; ++k) {
      wait_for(&barriers.full[cursor.stage], cursor.parity);
      uint32_t const filter_address =
          filter_ring + (kPingPong ? k : cursor.stage) * p.filter_stage_bytes + own_filter;
      uint64_t a = operand(filter_address, kBlockM);
      uint64_t const b0 = operand(
          input_ring + cursor.stage * p.input_stage_bytes + own_positions * 16, p.plane_pitch);
      if constexpr (Traits::kSplits) {
        // The tensor core drops bits in every addition to an accumulator, which a long sum would
        // show. So a filter row is summed by itself, the small products first, and added with
        // rounding.
        if (k == 0) {
#pragma unroll
          for (float& value : sum) value = 0.0f;
        }
        for (int k_block = 0; k_block < p.k_blocks_per_stage; ++k_block) {
          for (int r = 0; r < p.filter_rows_per_stage; ++r) {
            uint64_t const b = b0 + uint64_t(k_block * 2 * p.plane_pitch + r * p.staged_row_pitch);
            float row[kAccumulators];
            cute::warpgroup_arrive();
            for (int t = 0; t < p.taps_w; ++t) {
              uint64_t const at = a + uint64_t(t * (kTapBytes >> 4));
              uint64_t const bt = b + uint64_t(t * p.tap_step_w);
              multiply<Mma>(at, bt + input_small, row, t > 0, Indices{});
              multiply<Mma>(at + filter_small, bt, row, true, Indices{});
            }
            for (int t = 0; t < p.taps_w; ++t) {
              multiply<Mma>(a + uint64_t(t * (kTapBytes >> 4)), b + uint64_t(t * p.tap_step_w), row,
                            true, Indices{});
            }
            cute::warpgroup_commit_batch();
            cute::warpgroup_wait<0>();
#pragma unroll
            for (int i = 0; i < kAccumulators; ++i) {
              cute::warpgroup_fence_operand(row[i]);
              sum[i] += row[i];
            }
            a += uint64_t(p.taps_w * (kTapBytes >> 4));
          }
        }
        if (first_lane) device::arrive(&barriers.empty[cursor.stage]);
      } else {
        auto const multiply_tap = [&](uint64_t b, bool accumulate) {
          multiply<Mma>(a, b, sum, accumulate, Indices{});
          a += kTapBytes >> 4;
        };
        // Once the first product of this stage has begun, the previous stage is through.
        cute::warpgroup_arrive();
        multiply_tap(b0, k > 0);
        cute::warpgroup_commit_batch();
        if (k > 0) {
          cute::warpgroup_wait<1>();
          if (first_lane) device::arrive(&barriers.empty[previous]);
        }
        cute::warpgroup_arrive();
        if (p.three_by_three) {
#pragma unroll
          for (int i = 1; i < 9; ++i) {
            multiply_tap(b0 + uint64_t(i / 3 * p.staged_row_pitch + i % 3 * p.tap_step_w), true);
          }
        } else {
          for (int k_block = 0; k_block < p.k_blocks_per_stage; ++k_block) {
            for (int r = 0; r < p.filter_rows_per_stage; ++r) {
              uint64_t b = b0 + uint64_t(k_block * 2 * p.plane_pitch + r * p.staged_row_pitch);
              for (int t = 0; t < p.taps_w; ++t) {
                if (k_block + r + t > 0) multiply_tap(b, true);
                b += p.tap_step_w;
              }
            }
          }
        }
        cute::warpgroup_commit_batch();
      }
      previous = cursor.stage;
      cursor.advance(p.stages);
    }
    if constexpr (kPingPong) {
      cursor.skip(p.k_iterations, p.stages);
      device::arrive_threads(kOrderBarrier + 1 - warpgroup, 2 * kWarpgroupThreads);
    }
    if constexpr (!Traits::kSplits) {
      cute::warpgroup_wait<0>();
#pragma unroll
      for (float& value : sum) cute::warpgroup_fence_operand(value);
      if (first_lane) device::arrive(&barriers.empty[previous]);
    }

    // The second block of channels of the last tile may hold none.
    if (channel0 >= p.blocks_m * kBlockM) continue;
    int const position0 = tile.n * Traits::kTileN + own_positions;
    if (p.wraps) {
      finish_tile<Traits, true>(p, sum, tile, position0, channel0, bias[0], bias[1]);
    } else {
      finish_tile<Traits, false>(p, sum, tile, position0, channel0, bias[0], bias[1]);
    }
  }
}

}  // namespace fusedconv::conv::sm90
