// How many pixels a tile's moments are of.
#pragma once

#include "conv/sm90/runs/raster.hpp"
#include "conv/sm90/runs/rows.hpp"

namespace fusedconv::conv::sm90::runs {

// Of a sample's tile, for an output channel and, where phases have taps of their own, one along
// depth and height.
struct TilePixels {
  Raster raster;
  int of_position;

  static TilePixels of(Config const& config) {
    return {Raster::of(config.problem, config.schedule, config.traits().element_bytes()),
            config.phases.w.count};
  }

  __device__ __forceinline__ int operator()(int tile) const {
    return Tile(raster, tile).pixels(raster) * of_position;
  }
};

}  // namespace fusedconv::conv::sm90::runs
