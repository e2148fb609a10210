// How many pixels a tile's moments are of.
#pragma once

#include "conv/sm90/runs/raster.hpp"
#include "conv/sm90/runs/rows.hpp"

namespace fusedconv::conv::sm90::runs {

// Of a sample's tile.
struct TilePixels {
  Raster raster;

  static TilePixels of(Config const& config) {
    return {Raster::of(config.problem, config.schedule, config.traits().element_bytes())};
  }

  __device__ __forceinline__ int operator()(int tile) const {
    return Tile(raster, tile).pixels(raster);
  }
};

}  // namespace fusedconv::conv::sm90::runs
