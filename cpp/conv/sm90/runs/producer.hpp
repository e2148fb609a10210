// A warp that fills a ring: of each tile one box of lines per depth tap and k-block, in one tensor
// copy, which fills what lies outside the tensor with zeros. In a shared ring a stage takes a box
// for each consumer, and their part of the filter.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstdint>

#include "conv/sm90/runs/params.hpp"
#include "conv/sm90/runs/traits.hpp"
#include "cuda/async.hpp"
#include "cute/arch/copy_sm90_tma.hpp"

namespace fusedconv::conv::sm90::runs {

// With boxes of the two shapes of tiles. Kernel parameters, hence pointers.
struct Maps {
  CUtensorMap const* first;
  CUtensorMap const* last;
};

// kBoxes: of a stage.
template <class Traits, int kBoxes>
__device__ __forceinline__ void produce(Params const& p, Barriers& barriers, Memory const& memory,
                                        unsigned char* shared, int ring,
                                        Block<Traits::kOwnTaps> const& block, Maps const& maps) {
  uint64_t* const full = barriers.full[ring];
  uint64_t* const empty = barriers.empty[ring];
  int volatile* const turn = barriers.turn[ring];
  uint32_t const start = device::shared_address(shared);
  unsigned char* const boxes = shared + (memory.box - start);
  unsigned char const* const filter =
      p.filter + int64_t(block.number) * p.k_iterations * p.filter_stage_bytes;
  device::RingCursor cursor;
  cursor.parity = 1;
  Turns turns(p, block.number, block.sets);
  while (turns.next < turns.count) {
    int const current = turns.next;
    turns.take();
    // Input columns line up with the output's: the window reads as far before as padding reaches.
    int x[kBoxes], y[kBoxes], d[kBoxes], sample[kBoxes];
    CUtensorMap const* map[kBoxes];
    int bytes = kBoxes > 1 ? block.filter_stage_bytes() : 0;
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {
      Tile const tile(p.raster, min(current * kBoxes + i, p.tile_count - 1));
      Raster::Shape const& shape = p.raster.shapes[tile.shape];
      map[i] = tile.shape == 0 ? maps.first : maps.last;
      x[i] = tile.column0 - shape.lead;
      y[i] = tile.row0 - block.lower_h();
      d[i] = tile.slice - block.lower_d();
      sample[i] = tile.sample;
      bytes += shape.bytes;
    }
    int depth_tap = 0, k_block = 0;
    for (int k = 0; k < block.k_iterations(); ++k) {
      wait_for(&empty[cursor.stage], cursor.parity);
      turn[cursor.stage] = current;
      device::arrive_and_expect(&full[cursor.stage], bytes);
      unsigned char* const target = boxes + cursor.stage * memory.stage_stride;
      // Beyond the last depth tap come channels that are not there.
      int const channel =
          (depth_tap == block.depth_taps() ? p.k_blocks : k_block) * Traits::kKBlock;
#pragma unroll
      for (int i = 0; i < kBoxes; ++i) {
        cute::SM90_TMA_LOAD_5D::copy(map[i], &full[cursor.stage],
                                     uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                                     target + i * p.box_bytes, x[i], channel, y[i],
                                     d[i] + depth_tap * p.dilation_d, sample[i]);
      }
      if constexpr (kBoxes > 1) {
        device::bulk_load(memory.filter + cursor.stage * memory.stage_stride,
                          filter + int64_t(k) * block.filter_stage_bytes(),
                          block.filter_stage_bytes(), &full[cursor.stage]);
      }
      if (++k_block == p.k_blocks) {
        k_block = 0;
        ++depth_tap;
      }
      cursor.advance(p.stages);
    }
  }
  wait_for(&empty[cursor.stage], cursor.parity);
  turn[cursor.stage] = kNoTurn;
  device::arrive(&full[cursor.stage]);
}

}  // namespace fusedconv::conv::sm90::runs
