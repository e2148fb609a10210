// Where tiles lie among the output's pixels, on the device.
#pragma once

#include "conv/problem.hpp"
#include "conv/sm90/runs/schedule.hpp"
#include "cutlass/fast_math.h"

namespace fusedconv::conv::sm90::runs {

struct Raster {
  // A tiling's strips and tiles.
  struct Shape {
    cutlass::FastDivmod tiles, quads;
    int tile_quads, width, column0;
    // The box in shared memory: bytes of a line of one channel, of a line of all its channels, of
    // all lines; its columns before the strip's, its lines.
    int pitch, line_bytes, bytes, lead, lines;
  };
  Shape shapes[2];
  cutlass::FastDivmod slice_tiles, slices;
  int wide_tiles;  // of a slice, in the first shape
  int p, q;

  static Raster of(ConvProblem const& c, Schedule const& s, int element_bytes) {
    Raster result{};
    for (int i = 0; i < 2; ++i) {
      Tiling const& t = s.tilings[i];
      if (t.strips == 0) continue;
      int const pitch = t.columns * element_bytes;
      result.shapes[i] = {.tiles = cutlass::FastDivmod(t.tiles),
                          .quads = cutlass::FastDivmod(t.quads),
                          .tile_quads = t.tile_quads,
                          .width = t.width(),
                          .column0 = t.column0,
                          .pitch = pitch,
                          .line_bytes = kKBlockBytes / element_bytes * pitch,
                          .bytes = t.bytes,
                          .lead = t.lead,
                          .lines = t.lines};
    }
    result.slice_tiles = cutlass::FastDivmod(s.slice_tiles);
    result.slices = cutlass::FastDivmod(c.z);
    result.wide_tiles = s.tilings[0].slice_tiles();
    result.p = c.p;
    result.q = c.q;
    return result;
  }
};

// Of the tiles of a batch, for some block of output channels.
struct Tile {
  int sample, slice, shape, column0;
  int quad0, row0;  // its first quad in the strip, and that one's row

  __device__ __forceinline__ Tile(Raster const& raster, int index) {
    int in_slice, strip, tile, ignored;
    raster.slice_tiles(index, in_slice, index);
    raster.slices(sample, slice, index);
    shape = in_slice >= raster.wide_tiles ? 1 : 0;
    Raster::Shape const& s = raster.shapes[shape];
    s.tiles(strip, tile, in_slice - (shape == 1 ? raster.wide_tiles : 0));
    column0 = s.column0 + strip * s.width;
    quad0 = tile * s.tile_quads;
    s.quads(row0, ignored, quad0);
  }

  // Of its positions, those that are pixels.
  __device__ __forceinline__ int pixels(Raster const& raster) const {
    Raster::Shape const& s = raster.shapes[shape];
    int const width = min(s.width, raster.q - column0);
    auto const before = [&](int quad) {
      int row, column;
      s.quads(row, column, quad);
      return row >= raster.p ? raster.p * width : row * width + min(width, column * kQuad);
    };
    return before(quad0 + s.tile_quads) - before(quad0);
  }
};

}  // namespace fusedconv::conv::sm90::runs
