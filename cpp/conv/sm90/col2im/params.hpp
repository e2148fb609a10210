// What the kernel is launched with.
#pragma once

#include <cstdint>

#include "conv/sm90/col2im/rows.hpp"
#include "cutlass/fast_math.h"

namespace fusedconv::conv::sm90::col2im {

struct Params {
  void const* bias;
  float const* scale;
  float const* shift;
  void* output;
  Activation activation;
  int reserved, chunks, stages, box_positions, output_channels;
  int box[kMaxAxes], tile[kMaxAxes], output_extent[kMaxAxes];
  int rows[kMaxAxes];         // from a position to its neighbour along an axis, in rows of products
  int columns[kMaxAxes];      // from a tap to the next one, in columns
  int channel_columns;        // the same of output channels
  int first_reach[kMaxAxes];  // of an axis in the table of all
  Axis axes[kMaxAxes];
  bool short_taps;
  int reaches;  // where the table of all axes' begins in shared memory
  // What is staged together: pieces of lines, from one to the next so many elements.
  int pieces, piece_pitch, round_pieces;
  int share_channels, round_units;  // of a thread at a time, and how many of those
  cutlass::FastDivmod tiles_d, tiles_h, tiles_w, strides[kMaxAxes], height, piece, line_pieces,
      round_pixels;

  static Params of(Arguments const& a) {
    Config const& config = a.config;
    Schedule const& s = config.schedule;
    FilterSource const source = a.weight != nullptr ? *a.weight : packed_source(config);
    Params p{};
    p.bias = a.bias;
    p.scale = a.scale;
    p.shift = a.shift;
    p.output = a.output;
    p.activation = a.activation;
    p.reserved = s.reserved;
    p.chunks = s.chunks;
    p.stages = s.stages;
    p.output_channels = config.problem.output_channels;
    p.box_positions = s.box[0] * s.box[1] * s.box[2];
    int64_t const strides[kMaxAxes] = {source.stride_t, source.stride_r, source.stride_s};
    int reaches = 0;
    for (int i = 0; i < kMaxAxes; ++i) {
      AxisProblem const& axis = s.axes[i].problem;
      p.axes[i] = s.axes[i];
      p.box[i] = s.box[i];
      p.tile[i] = s.tile[i];
      p.output_extent[i] = axis.output;
      // Those of axes of one tap may be anything.
      p.columns[i] = axis.kernel > 1 ? int(strides[i]) : 0;
      p.first_reach[i] = reaches;
      p.strides[i] = cutlass::FastDivmod(axis.stride);
      reaches += s.tile[i];
    }
    p.channel_columns = source.k > 1 ? int(source.stride_k) : 0;
    p.rows[2] = 1;
    p.rows[1] = s.box[2];
    p.rows[0] = s.box[1] * s.box[2];
    p.short_taps = s.has_short_taps();
    p.tiles_d = cutlass::FastDivmod(s.tiles[0]);
    p.tiles_h = cutlass::FastDivmod(s.tiles[1]);
    p.tiles_w = cutlass::FastDivmod(s.tiles[2]);
    p.reaches = s.reaches;
    Pieces const& pieces = s.pieces;
    p.pieces = s.tile[0] * s.tile[1] * pieces.of_line;
    p.piece_pitch = pieces.pitch;
    p.round_pieces = pieces.together;
    p.share_channels = pieces.share_channels;
    p.round_units =
        pieces.together * pieces.pixels * int(ceil_div(p.output_channels, pieces.share_channels));
    p.piece = cutlass::FastDivmod(pieces.pixels);
    p.line_pieces = cutlass::FastDivmod(pieces.of_line);
    p.round_pixels = cutlass::FastDivmod(pieces.together * pieces.pixels);
    p.height = cutlass::FastDivmod(s.tile[1]);
    return p;
  }
};

}  // namespace fusedconv::conv::sm90::col2im
