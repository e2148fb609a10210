// The warpgroup that fills the stages. A k-iteration:
// 1. Its warps wait until the consumers have left the stage and, where TMA loads the input, until
//    its rows have landed. Where the filter is kept, the first rows are read before the stage is
//    free.
// 2. One thread starts the bulk copy of the filter's part, unless the filter is kept.
// 3. All threads transpose the rows, or load elements, to K-major planes, rounded or split.
// 4. Each warp makes its stores visible to the tensor cores, arrives at the stage's barrier and
//    gives the rows back.
// 5. One warp, another each time, starts the copies of a later k-iteration into the TMA stage that
//    all warps have left.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "conv/sm90/params.hpp"
#include "conv/sm90/staging.hpp"
#include "conv/sm90/traits.hpp"
#include "cuda/async.hpp"
#include "cute/arch/copy_sm90_desc.hpp"
#include "cute/arch/copy_sm90_tma.hpp"

namespace fusedconv::conv::sm90 {

// A warp starts the copies of a k-iteration of a tile, or of the tiles after it: one copy for each
// row and k-block, zeros outside the input.
template <class Traits>
__device__ __forceinline__ void load_rows(Params const& p, CUtensorMap const& map, int index,
                                          int k_iteration, uint64_t* barrier,
                                          unsigned char* tma_stage) {
  while (k_iteration >= p.k_iterations) {
    k_iteration -= p.k_iterations;
    index += gridDim.x;
  }
  if (index >= p.tile_count) return;
  Tile const tile(p, index);
  int iteration_d, iteration_h, iteration_c;
  p.iterations_c(iteration_h, iteration_c, k_iteration);
  p.iterations_h(iteration_d, iteration_h, iteration_h);
  int const position =
      tile.n * Traits::kTileN + iteration_d * p.tap_step_d + iteration_h * p.stage_step_h;
  int const row0 = p.raster.pitch_w.div(position);
  int const column = tile.strip * p.raster.strip_width - p.lower_w - lead<Traits>(p, tile.strip);
  int const lane = threadIdx.x % 32;
  if (lane == 0) device::arrive_and_expect(barrier, p.tma_stage_bytes);
  int const box_bytes = p.input_row_elements * kKBlockBytes;
  for (int i = lane; i < p.input_rows; i += 32) {
    int slice, row;
    p.raster.pitch_h(slice, row, row0 + i);
    slice -= p.lower_d;
    row -= p.lower_h;
    unsigned char* target = tma_stage + i * box_bytes;
    int channel = iteration_c * p.k_blocks_per_stage * Traits::kKBlock;
    for (int k_block = 0; k_block < p.k_blocks_per_stage; ++k_block) {
      constexpr auto kNormal = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
      if constexpr (Traits::kLayout == Layout::kChannelsFirst) {
        cute::SM90_TMA_LOAD_5D::copy(&map, barrier, kNormal, target, column, row, slice, channel,
                                     tile.sample);
      } else {
        cute::SM90_TMA_LOAD_5D::copy(&map, barrier, kNormal, target, channel, column, row, slice,
                                     tile.sample);
      }
      channel += Traits::kKBlock;
      target += p.input_rows * box_bytes;
    }
  }
  __syncwarp();
}

template <class Traits, bool kTma>
__device__ __forceinline__ void produce(Params const& p, Barriers& barriers, uint32_t filter_ring,
                                        uint32_t input_ring, CUtensorMap const& map,
                                        int tma_offset) {
  extern __shared__ __align__(1024) unsigned char shared[];
  unsigned char* const tma_ring = shared + tma_offset;
  using T = typename Traits::Element;
  int const thread = threadIdx.x % kWarpgroupThreads;
  uint32_t const small = uint32_t(p.input_stage_bytes) / 2;
  device::RingCursor cursor, tma_cursor;
  // The TMA stage of the k-iteration before, which all warps leave.
  device::RingCursor released;
  Transposer<Traits> transposer;
  ElementLoader<Traits> loader(thread);
  int transposed = 0;  // k-iterations
  if (kTma && thread < 32) {
    for (int i = 0; i < p.tma_stages; ++i) {
      load_rows<Traits>(p, map, blockIdx.x, i, &barriers.tma_full[i],
                        tma_ring + i * p.tma_stage_bytes);
    }
  }
  for (int index = blockIdx.x; index < p.tile_count; index += gridDim.x) {
    Tile const tile(p, index);
    T const* const sample = static_cast<T const*>(p.input) + tile.sample * p.input_sample;
    int k_iteration = 0;
    for (int run = 0; run < p.runs; ++run) {  // of k-iterations that differ in channels alone
      int iteration_d, iteration_h;
      p.iterations_h(iteration_d, iteration_h, run);
      int const position =
          tile.n * Traits::kTileN + iteration_d * p.tap_step_d + iteration_h * p.stage_step_h;
      if constexpr (kTma) {
        transposer.locate(p, tile.strip, position);
      } else {
        loader.locate(p, tile.strip, position);
      }
      for (int iteration_c = 0; iteration_c < p.iterations_c.divisor; ++iteration_c) {
        auto const acquire_stage = [&] {
          wait_for(&barriers.empty[cursor.stage], cursor.parity ^ 1);
        };
        constexpr bool kAcquiresLate = kTma && Traits::kKeepsFilter;
        if (!kAcquiresLate) acquire_stage();
        if (!Traits::kKeepsFilter && thread == 0) {
          device::arrive_and_expect(&barriers.full[cursor.stage], p.filter_stage_bytes);
          device::bulk_load(
              filter_ring + cursor.stage * p.filter_stage_bytes,
              p.filter + (int64_t(tile.m) * p.k_iterations + k_iteration) * p.filter_stage_bytes,
              p.filter_stage_bytes, &barriers.full[cursor.stage]);
        }
        uint32_t target = input_ring + cursor.stage * p.input_stage_bytes;
        if constexpr (kTma) {
          wait_for(&barriers.tma_full[tma_cursor.stage], tma_cursor.parity);
        }
        for (int k_block = 0; k_block < p.k_blocks_per_stage; ++k_block) {
          if constexpr (kTma) {
            transposer.transpose(p,
                                 tma_offset + tma_cursor.stage * p.tma_stage_bytes +
                                     k_block * p.input_rows * p.input_row_elements * kKBlockBytes,
                                 target, small, [&] {
                                   if (kAcquiresLate && k_block == 0) acquire_stage();
                                 });
          } else {
            int const channel = (iteration_c * p.k_blocks_per_stage + k_block) * Traits::kKBlock;
            loader.load(p, sample + channel * p.channel_stride, p.channels - channel, target,
                        small);
          }
          target += 2 * p.plane_pitch * 16;
        }
        device::fence_async_proxy();
        __syncwarp();
        if (thread % 32 == 0) {
          device::arrive(&barriers.full[cursor.stage]);
          if (kTma) device::arrive(&barriers.tma_empty[tma_cursor.stage]);
        }
        cursor.advance(p.stages);
        if constexpr (kTma) {
          tma_cursor.advance(p.tma_stages);
          if (transposed > 0) {
            if (transposed % kWarpgroupWarps == thread / 32) {
              wait_for(&barriers.tma_empty[released.stage], released.parity);
              load_rows<Traits>(p, map, index, k_iteration - 1 + p.tma_stages,
                                &barriers.tma_full[released.stage],
                                tma_ring + released.stage * p.tma_stage_bytes);
            }
            released.advance(p.tma_stages);
          }
          ++transposed;
        }
        ++k_iteration;
      }
    }
  }
}

}  // namespace fusedconv::conv::sm90
