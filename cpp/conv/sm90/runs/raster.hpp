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
    int rows, width, column0;
    // The box in shared memory: bytes of a line of one channel, of a line of all its channels, of
    // all lines; its columns before a tile's.
    int pitch, line_bytes, bytes, lead;
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
                          .rows = t.rows,
                          .width = t.width(),
                          .column0 = t.column0,
                          .pitch = pitch,
                          .line_bytes = kKBlockBytes / element_bytes * pitch,
                          .bytes = t.bytes,
                          .lead = t.lead};
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
  int sample, slice, shape, column0, row0;

  __device__ __forceinline__ Tile(Raster const& raster, int index) {
    int in_slice, strip, tile;
    raster.slice_tiles(index, in_slice, index);
    raster.slices(sample, slice, index);
    shape = in_slice >= raster.wide_tiles ? 1 : 0;
    Raster::Shape const& s = raster.shapes[shape];
    s.tiles(strip, tile, in_slice - (shape == 1 ? raster.wide_tiles : 0));
    column0 = s.column0 + strip * s.width;
    row0 = tile * s.rows;
  }

  // Of its positions, those that are pixels.
  __device__ __forceinline__ int pixels(Raster const& raster) const {
    Raster::Shape const& s = raster.shapes[shape];
    return min(s.rows, raster.p - row0) * min(s.width, raster.q - column0);
  }
};

}  // namespace fusedconv::conv::sm90::runs
