// What the kernels are launched with, and the taps of a tile's lines.
#pragma once

#include <cstdint>

#include "conv/direct/rows.hpp"
#include "cuda/tile.hpp"
#include "cutlass/fast_math.h"
#include "groupnorm/affine.hpp"

namespace fusedconv::conv::direct {

struct Params {
  void const* input;
  void const* weight;
  void const* bias;
  void* output;
  CountedPartial* partials;
  groupnorm::Affine affine;
  FilterSource source;
  Axis axes[kMaxAxes];
  int tile[kMaxAxes], extent[kMaxAxes], lines[kMaxAxes], box[kMaxAxes], before[kMaxAxes];
  int channels, output_channels, groups;  // channels of a group
  int block_channels, weight_floats, team_threads, segment, tile_count, run_count;
  bool activates_output, joined, direct_stores;
  Activation activation;
  int64_t slots;  // of a sample
  cutlass::FastDivmod tiles_d, tiles_h, tiles_w, channel_blocks, conv_groups;
  cutlass::FastDivmod lines_h, runs, kernel_d, kernel_h, kernel_w, taps_channels;
  cutlass::FastDivmod box_h, box_quads, segment_vectors, extent_h, columns, weight_columns,
      group_channels;

  static Params of(Arguments const& arguments);
};

// A line of outputs, or an output along width: its taps along the axis.
struct alignas(kLineBytes) Line {
  int taps;       // kOutside: not an output
  int first_tap;  // then every tap_step
  int at;         // input position of the first, then every sub_dilation less
  int output;     // position in the output
};
inline constexpr int kOutside = -1;

__device__ __forceinline__ Line line_of(Axis const& axis, int quotient, int residue, int origin) {
  int const output = quotient * axis.problem.stride + residue;
  Phase const phase = axis.phase(residue);
  return {output < axis.problem.output ? phase.taps : kOutside, phase.first_tap,
          quotient + phase.shift - origin, output};
}

// A tile's place in the output: quotients along depth and height, outputs along width.
struct Place {
  int sample, tile, origin[kMaxAxes];

  // Tiles of a sample are innermost in index.
  __device__ __forceinline__ Place(Params const& p, int& rest) {
    int d, h, w;
    p.tiles_w(rest, w, rest);
    p.tiles_h(rest, h, rest);
    p.tiles_d(rest, d, rest);
    tile = (d * p.tiles_h.divisor + h) * p.tiles_w.divisor + w;
    origin[0] = d * p.tile[0];
    origin[1] = h * p.tile[1];
    origin[2] = w * p.tile[2];
    sample = 0;
  }
};

// Writes a tile's table: lines along depth, then height, each phase by phase, so that neighbours
// have as many taps; then outputs along width. origin: what input positions are counted from.
__device__ __forceinline__ void write_lines(Params const& p, Place const& place,
                                            int const (&origin)[kMaxAxes], Line* table, int thread,
                                            int threads) {
#pragma unroll
  for (int a = 0; a < kMaxAxes; ++a) {
    for (int i = thread; i < p.lines[a]; i += threads) {
      if (a < 2) {
        table[i] = line_of(p.axes[a], place.origin[a] + i % p.tile[a], i / p.tile[a], origin[a]);
      } else {
        int const output = place.origin[a] + i, stride = p.axes[a].problem.stride;
        table[i] = line_of(p.axes[a], output / stride, output % stride, origin[a]);
      }
    }
    table += p.lines[a];
  }
}

inline Params Params::of(Arguments const& a) {
  Config const& config = a.config;
  Problem const& c = config.problem;
  Schedule const& s = config.schedule;
  bool const last = c.layout == Layout::kChannelsLast;
  Params p{};
  p.input = a.input;
  p.weight = a.filter;
  p.bias = a.bias;
  p.output = a.output;
  p.partials = a.partials;
  if (a.norm != nullptr) {
    p.affine = groupnorm::affine_of(*a.norm, a.norm_weight, a.norm_bias, a.statistics);
  }
  p.source = config.source;
  for (int i = 0; i < kMaxAxes; ++i) {
    p.axes[i] = s.axes[i];
    p.tile[i] = s.tile[i];
    p.extent[i] = s.extent[i];
    p.lines[i] = s.lines[i];
    p.box[i] = s.box[i];
    p.before[i] = s.before[i];
  }
  p.channels = c.channels;
  p.output_channels = c.output_channels;
  p.groups = c.groups;
  p.block_channels = s.block_channels;
  p.weight_floats = s.weight_floats;
  p.team_threads = s.team_threads();
  p.segment = s.segment;
  p.run_count = int(ceil_div(s.tile[2], s.run()));
  int64_t const tiles = a.batch * s.sample_tiles() * s.channel_blocks * (last ? 1 : c.groups);
  p.tile_count = int(tiles);
  p.activates_output = a.activates_output;
  p.activation = a.activation;
  p.joined = s.joined;
  int const vector = 16 / config.traits().element_bytes();
  p.direct_stores = !last && s.run() == kRun && s.axes[2].problem.output % vector == 0 &&
                    device::is_aligned(a.output, 16);
  p.slots = config.partial_slots();
  auto const divisor = [](int value) { return cutlass::FastDivmod(std::max(1, value)); };
  p.tiles_d = divisor(s.tiles[0]);
  p.tiles_h = divisor(s.tiles[1]);
  p.tiles_w = divisor(s.tiles[2]);
  p.channel_blocks = divisor(s.channel_blocks);
  p.conv_groups = divisor(c.groups);
  p.lines_h = divisor(s.lines[1]);
  p.runs = divisor(p.run_count);
  p.kernel_d = divisor(c.axes[0].kernel);
  p.kernel_h = divisor(c.axes[1].kernel);
  // Channels first, filter rows are read four taps at once.
  p.kernel_w = divisor(last ? c.axes[2].kernel : int(round_up(c.axes[2].kernel, 4)));
  p.taps_channels = divisor(c.channels);
  p.box_h = divisor(s.box[1]);
  p.box_quads = divisor(s.box[2] / 4);
  p.segment_vectors = divisor(s.segment / vector);
  p.extent_h = divisor(s.extent[1]);
  p.columns = divisor(s.block_channels / s.vector);
  p.weight_columns = divisor(s.block_channels);
  p.group_channels = divisor(c.output_channels);
  return p;
}

}  // namespace fusedconv::conv::direct
