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
  bool is_staggered;

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
    result.is_staggered = s.is_staggered;
    return result;
  }

  // Columns that a row's quads begin before their strip's.
  __device__ __forceinline__ int stagger(int slice, int row) const {
    return is_staggered ? (slice * p + row) % 2 * kStagger : 0;
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
    // Of a row, in the strip's first so many columns.
    auto const of_row = [&](int stagger, int columns) {
      int const first = column0 - stagger;
      return min(raster.q, first + columns) - max(0, first);
    };
    auto const before = [&](int quad) {
      int row, column;
      s.quads(row, column, quad);
      bool const is_inside = row < raster.p;
      row = min(row, raster.p);
      int result = row * of_row(0, s.width);
      if (raster.is_staggered) {
        int const staggered = (row + slice * raster.p % 2) / 2;
        result += staggered * (of_row(kStagger, s.width) - of_row(0, s.width));
      }
      if (is_inside && column > 0) result += of_row(raster.stagger(slice, row), column * kQuad);
      return result;
    };
    return before(quad0 + s.tile_quads) - before(quad0);
  }
};

}  // namespace fusedconv::conv::sm90::runs
