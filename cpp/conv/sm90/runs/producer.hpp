// A warp that fills a consumer's ring: of each of its tiles one box of lines per depth tap and
// k-block, in one tensor copy. Copies fill what lies outside the tensor with zeros.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "conv/sm90/runs/params.hpp"
#include "conv/sm90/runs/traits.hpp"
#include "cuda/async.hpp"
#include "cute/arch/copy_sm90_tma.hpp"

namespace fusedconv::conv::sm90::runs {

template <class Traits>
__device__ __forceinline__ void produce(Params const& p, Barriers& barriers, unsigned char* ring,
                                        int consumer, int block_n, CUtensorMap const& wide,
                                        CUtensorMap const& narrow) {
  device::RingCursor cursor;
  cursor.parity = 1;
  Turns turns(p, block_n);
  while (turns.next < p.tile_count) {
    int const index = turns.next;
    turns.take(p);
    Tile const tile(p.raster, index);
    Raster::Shape const& shape = p.raster.shapes[tile.shape];
    CUtensorMap const* const map = tile.shape == 0 ? &wide : &narrow;
    // Input columns line up with the output's: the window reads as far before as padding reaches.
    int const x = tile.column0 - shape.lead;
    int const y = tile.row0 - p.lower_h;
    int depth_tap = 0, k_block = 0;
    for (int k = 0; k < p.k_iterations; ++k) {
      wait_for(&barriers.empty[consumer][cursor.stage], cursor.parity);
      uint64_t* const full = &barriers.full[consumer][cursor.stage];
      barriers.tile[consumer][cursor.stage] = index;
      device::arrive_and_expect(full, shape.bytes);
      // Beyond the last depth tap come channels that are not there.
      bool const beyond = depth_tap == p.depth_taps;
      cute::SM90_TMA_LOAD_5D::copy(map, full, uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                                   ring + cursor.stage * p.stage_bytes, x,
                                   (beyond ? p.k_blocks : k_block) * Traits::kKBlock, y,
                                   tile.slice - p.lower_d + depth_tap * p.dilation_d, tile.sample);
      if (++k_block == p.k_blocks) {
        k_block = 0;
        ++depth_tap;
      }
      cursor.advance(p.stages);
    }
  }
  wait_for(&barriers.empty[consumer][cursor.stage], cursor.parity);
  barriers.tile[consumer][cursor.stage] = kNoTile;
  device::arrive(&barriers.full[consumer][cursor.stage]);
}

}  // namespace fusedconv::conv::sm90::runs
