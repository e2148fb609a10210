// What the kernels are launched with, and the taps of a tile's lines.
#pragma once

#include <cstdint>

#include "conv/direct/rows.hpp"
#include "cuda/tile.hpp"
#include "cutlass/fast_math.h"
#include "groupnorm/affine.hpp"

namespace fusedconv::conv::direct {

// Phases along an axis that the host computes.
inline constexpr int kFirstPhases = 8;

struct Params {
  void const* input;
  void const* weight;
  void const* bias;
  void* output;
  CountedPartial* partials;
  groupnorm::Affine affine;
  FilterSource source;
  Axis axes[kMaxAxes];
  Phase first_phases[kMaxAxes][kFirstPhases];
  int tile[kMaxAxes], extent[kMaxAxes], lines[kMaxAxes], box[kMaxAxes], before[kMaxAxes];
  int channels, output_channels, groups;  // channels of a group
  int block_channels, weight_floats, team_threads, segment, tile_count, run_count;
  bool activates_output, joined, direct_stores, vector_loads;
  Activation activation;
  int64_t slots;  // of a sample
  cutlass::FastDivmod tiles_d, tiles_h, tiles_w, channel_blocks, conv_groups;
  cutlass::FastDivmod tile_d, tile_h, stride_w, phases_w;
  cutlass::FastDivmod lines_h, runs, kernel_d, kernel_h, kernel_w, taps_channels;
  cutlass::FastDivmod box_d, box_h, box_quads, segment_vectors, extent_h, columns, weight_columns,
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

static __device__ __noinline__ Phase phase_by_call(Axis const& axis, int residue) {
  return axis.phase(residue);
}

__device__ __forceinline__ Line line_of(Params const& p, int axis, int quotient, int residue,
                                        int origin) {
  int const output = quotient * p.axes[axis].problem.stride + residue;
  Phase const phase = residue < kFirstPhases ? p.first_phases[axis][residue]
                                             : phase_by_call(p.axes[axis], residue);
  return {output < p.axes[axis].problem.output ? phase.taps : kOutside, phase.first_tap,
          quotient + phase.shift - origin, output};
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

// Writes a tile's table: lines along depth, then height, each phase by phase, so that neighbours
// have as many taps; then along width outputs, or (kPhases) the first of each phase. origin: what
// input positions are counted from.
template <bool kPhases>
__device__ __forceinline__ void write_lines(Params const& p, Place const& place,
                                            int const (&origin)[kMaxAxes], Line* table, int thread,
                                            int threads) {
  int const first_h = p.lines[0], first_w = first_h + p.lines[1], count = first_w + p.lines[2];
#pragma unroll 1
  for (int i = thread; i < count; i += threads) {
    int axis, quotient, residue;
    if (i < first_h) {
      axis = 0;
      p.tile_d(residue, quotient, i);
      quotient += place.origin[0];
    } else if (i < first_w) {
      axis = 1;
      p.tile_h(residue, quotient, i - first_h);
      quotient += place.origin[1];
    } else {
      axis = 2;
      residue = i - first_w;
      quotient = place.origin[2];
      if (!kPhases) p.stride_w(quotient, residue, quotient + residue);
    }
    table[i] = line_of(p, axis, quotient, residue, origin[axis]);
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
  p.team_threads = s.team_threads();
  p.segment = s.segment;
  p.run_count = int(ceil_div(s.tile[2], last ? kPixels : s.run()));
  int64_t const tiles = a.batch * s.sample_tiles() * s.channel_blocks * (last ? 1 : c.groups);
  p.tile_count = int(tiles);
  p.activates_output = a.activates_output;
  p.activation = a.activation;
  p.joined = s.joined;
  int const vector = 16 / config.traits().element_bytes();
  p.direct_stores = !last && s.run() == kRun && s.axes[2].problem.output % vector == 0 &&
                    device::is_aligned(a.output, 16);
  p.vector_loads = c.aligned && s.axes[2].problem.input % 4 == 0;
  p.slots = config.partial_slots();
  auto const divisor = [](int value) { return cutlass::FastDivmod(std::max(1, value)); };
  p.tile_d = divisor(s.tile[0]);
  p.tile_h = divisor(s.tile[1]);
  p.stride_w = divisor(s.axes[2].problem.stride);
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
  p.taps_channels = divisor(c.channels);
  p.box_d = divisor(s.box[0]);
  p.box_h = divisor(s.box[1]);
  // Quads of the input's lines begin up to three columns before the box.
  p.box_quads = divisor(s.box[2] / 4 + (p.vector_loads && s.before[2] % 4 != 0 ? 1 : 0));
  p.segment_vectors = divisor(s.segment / vector);
  p.extent_h = divisor(s.extent[1]);
  p.columns = divisor(s.block_channels / s.vector);
  p.weight_columns = divisor(s.block_channels);
  p.group_channels = divisor(c.output_channels);
  return p;
}

}  // namespace fusedconv::conv::direct
