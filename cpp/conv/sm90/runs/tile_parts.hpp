// Partial moments by tile, with the pixels that they are of.
#pragma once

#include <cstdint>

#include "conv/sm90/runs/raster.hpp"
#include "conv/sm90/runs/rows.hpp"
#include "groupnorm/statistics.hpp"

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

// [N, tiles, channels], where channels are those of a phase along depth and height each.
struct TileParts {
  TilePartial const* __restrict__ base;
  TilePixels pixels;
  int64_t tiles, channels;

  static TileParts of(Config const& config, TilePartial const* base) {
    return {base, TilePixels::of(config), config.schedule.tiles,
            config.problem.k / config.phases.w.count};
  }

  __device__ __forceinline__ groupnorm::Partial operator()(int sample, int tile,
                                                           int channel) const {
    TilePartial const own = base[(sample * tiles + tile) * channels + channel];
    return {float(pixels(tile)), own.mean, own.low, own.m2};
  }
};

}  // namespace fusedconv::conv::sm90::runs
