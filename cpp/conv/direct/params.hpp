// What the kernels are launched with, and the taps of a tile's lines.
#pragma once

#include <cstdint>

#include "conv/direct/rows.hpp"
#include "cuda/tile.hpp"
#include "cutlass/fast_math.h"

namespace fusedconv::conv::direct {

struct Params {
  void const* input;
  void const* weight;
  void const* bias;
  void* output;
  groupnorm::Partial* partials;
  FilterSource source;
  Axis axes[kMaxAxes];
  Phase first_phases[kMaxAxes][kFirstPhases];
  int tile[kMaxAxes], extent[kMaxAxes], lines[kMaxAxes], box[kMaxAxes], before[kMaxAxes];
  int channels, output_channels, groups;  // channels of a group
  int block_channels, weight_floats, bias_floats, team_threads, tile_count, run_count;
  // Channels first:
  int64_t output_pixels;
  int units;       // of a tile
  int team_lines;  // that are staged at once
  // From a thread's row to its next: outputs along height and width, in the box.
  int row_height, row_width, row_floats;
  // In the staged input, and in the staged weights: from a plane, a channel or a row to the next;
  // from a tap of a phase to its next along height and depth.
  int box_plane, box_channel, weight_row, weight_plane, weight_channel;
  int tap_rows, tap_planes, tap_weight_rows, tap_weight_planes;
  // In the staged outputs: from a line, a plane, a channel or a thread's row to the next.
  int staged_line, staged_plane, staged_channel, staged_row;
  bool activates_output, joined, stores_runs, vector_loads;
  Activation activation;
  int64_t slots;  // of a sample
  cutlass::FastDivmod tiles_d, tiles_h, tiles_w, channel_blocks, conv_groups;
  cutlass::FastDivmod tile_d, tile_h, stride_w, phases_h, phases_w, row_groups;
  cutlass::FastDivmod lines_h, runs, kernel_d, kernel_h, kernel_w, taps_channels;
  cutlass::FastDivmod box_d, box_h, team_quads, quad_passes, segment_vectors, extent_h, columns,
      weight_columns, group_channels, segments;

  static Params of(Arguments const& arguments);

 private:
  void set_planes(Schedule const& s);
};

static __device__ __noinline__ Phase phase_by_call(Axis const& axis, int residue) {
  return axis.phase(residue);
}

__device__ __forceinline__ Phase phase_of(Params const& p, int axis, int residue) {
  return residue < kFirstPhases ? p.first_phases[axis][residue]
                                : phase_by_call(p.axes[axis], residue);
}

// A tile's place: its first quotients along depth and height, and along width the first output, or
// channels last the first quotient.
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

// How channels first a team's part of shared memory is gone through.
inline void Params::set_planes(Schedule const& s) {
  bool const across = s.strip > 0;
  units = run_count * s.row_groups * s.axes[1].phases * s.tile[0] * s.axes[0].phases;
  // A thread's rows lie as far apart as a team has threads for, so that those of neighbours are
  // neighbours, in different banks.
  row_height = across ? 0 : s.row_groups * s.axes[1].problem.stride;
  row_width = across ? s.strip * s.run : 0;
  row_floats = across ? row_width / s.axes[2].problem.stride : s.row_groups * s.box[2];
  box_plane = s.box[1] * s.box[2];
  box_channel = s.box[0] * box_plane;
  weight_row = s.block_channels * kernel_w.divisor;
  weight_plane = s.axes[1].problem.kernel * weight_row;
  weight_channel = s.axes[0].problem.kernel * weight_plane;
  tap_rows = s.axes[1].sub_dilation * s.box[2];
  tap_planes = s.axes[0].sub_dilation * box_plane;
  tap_weight_rows = s.axes[1].tap_step * weight_row;
  tap_weight_planes = s.axes[0].tap_step * weight_plane;
  staged_line = s.staged[2];
  staged_plane = s.staged[1];
  staged_channel = s.staged[0];
  staged_row = row_height * staged_line + row_width;
  segments = cutlass::FastDivmod(s.segments());
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
  p.source = config.source;
  for (int i = 0; i < kMaxAxes; ++i) {
    p.axes[i] = s.axes[i];
    for (int j = 0; j < std::min(kFirstPhases, s.axes[i].phases); ++j) {
      p.first_phases[i][j] = s.axes[i].phase(j);
    }
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
  p.bias_floats = s.bias_floats();
  p.team_threads = s.team_threads();
  p.run_count = s.strip > 0 ? s.strip : int(ceil_div(s.tile[2], last ? kPixels : s.run));
  int64_t const tiles = a.batch * s.sample_tiles() * s.channel_blocks * (last ? 1 : c.groups);
  p.tile_count = int(tiles);
  p.activates_output = a.activates_output;
  p.activation = a.activation;
  p.joined = s.joined;
  int const vector = 16 / config.traits().element_bytes();
  p.stores_runs = s.stores_runs;
  p.vector_loads = c.aligned && s.axes[2].problem.input % 4 == 0;
  p.slots = config.partial_slots();
  auto const divisor = [](int value) { return cutlass::FastDivmod(std::max(1, value)); };
  p.tile_d = divisor(s.tile[0]);
  p.tile_h = divisor(s.tile[1]);
  p.stride_w = divisor(s.axes[2].problem.stride);
  p.phases_h = divisor(s.axes[1].phases);
  p.row_groups = divisor(s.row_groups);
  p.phases_w = divisor(s.axes[2].phases);
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
  p.output_pixels = 1;
  for (AxisProblem const& axis : c.axes) p.output_pixels *= axis.output;
  p.taps_channels = divisor(c.channels);
  p.box_d = divisor(s.box[0]);
  p.box_h = divisor(s.box[1]);
  bool const whole = s.before[2] % 4 == 0 && s.tiles[2] == 1;
  // Quads of the input's lines begin up to three columns before the box.
  int const quads = s.box[2] / 4 + (p.vector_loads && !whole ? 1 : 0);
  p.team_quads = divisor(std::min(quads, p.team_threads));
  p.quad_passes = divisor(int(ceil_div(quads, p.team_quads.divisor)));
  p.team_lines = std::max(1, p.team_threads / p.team_quads.divisor);
  // One that begins and ends anywhere.
  p.segment_vectors = divisor(int(ceil_div(s.segment + vector - 1, vector)));
  p.extent_h = divisor(s.extent[1]);
  p.columns = divisor(s.block_channels / s.vector);
  p.weight_columns = divisor(s.block_channels);
  p.group_channels = divisor(c.output_channels);
  if (!last) p.set_planes(s);
  return p;
}

}  // namespace fusedconv::conv::direct
