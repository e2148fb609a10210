// What the kernel is launched with, and where a block is in it.
#pragma once

#include <cstdint>

#include "conv/taps/rows.hpp"
#include "cuda/tile.hpp"
#include "cutlass/fast_math.h"

namespace fusedconv::conv::taps {

struct Params {
  void const* input;
  unsigned char const* filter;
  void const* bias;
  float const *scale, *shift;
  void* output;
  groupnorm::Partial* partials;
  Axis axes[kMaxAxes];
  int tile[kMaxAxes], box[kMaxAxes], lead;
  bool split[kMaxAxes];
  int channels, output_channels, groups;  // channels of a convolution group
  int row_groups, width_phases;
  int list_bytes;           // of shared memory
  int chunks, chunk_steps;  // of channels; taps of a chunk
  int output_vector;        // elements of a store
  bool channels_last, activates_output;
  Activation activation;
  int64_t partial_slots;  // of a sample
  cutlass::FastDivmod channel_blocks, phases_h, phases_w;
  cutlass::FastDivmod blocks_m, conv_groups, tiles_d, tiles_h, tiles_w;
  cutlass::FastDivmod tile_h, tile_w, box_h, box_w, box_positions;
  // Of the epilogue's stores: vectors of a line, lines of a channel; vectors of a pixel's channels.
  cutlass::FastDivmod line_vectors, lines, pixel_vectors, width_phase;

  static Params of(Arguments const& arguments);
};

inline constexpr int kNoTap = -1;

// A block's rows and tile.
struct Block {
  int sample, group, block_m, tile_index;
  int origin[kMaxAxes];  // the tile's first position

  __device__ __forceinline__ explicit Block(Params const& p, int64_t index) {
    int rest, m, td, th, tw;
    // Blocks of the same tile are neighbours, and read its input at the same time.
    p.blocks_m(rest, m, int(index));
    p.conv_groups(rest, group, rest);
    p.tiles_w(rest, tw, rest);
    p.tiles_h(rest, th, rest);
    p.tiles_d(sample, td, rest);
    block_m = m;
    tile_index = (td * p.tiles_h.divisor + th) * p.tiles_w.divisor + tw;
    origin[0] = td * p.tile[0];
    origin[1] = th * p.tile[1];
    origin[2] = tw * p.tile[2];
  }
};

// Where a row group lies: channels of one phase of the output.
struct RowPlace {
  bool present;
  int residue[kMaxAxes];
  int channel;  // the first, of the convolution group

  __device__ __forceinline__ RowPlace(Params const& p, int index) {
    present = index < p.row_groups;
    int rest = present ? index : 0;
    p.phases_w(rest, residue[2], rest);
    p.channel_blocks(rest, channel, rest);
    channel *= kGroupRows;
    p.phases_h(residue[0], residue[1], rest);
  }
};

struct RowGroup : RowPlace {
  Phase phases[kMaxAxes];

  __device__ __forceinline__ RowGroup(Params const& p, int index) : RowPlace(p, index) {
#pragma unroll
    for (int i = 0; i < kMaxAxes; ++i) phases[i] = p.axes[i].phase(residue[i]);
  }
  __device__ __forceinline__ bool has(int const (&tap)[kMaxAxes]) const {
    return present && tap[0] < phases[0].taps && tap[1] < phases[1].taps && tap[2] < phases[2].taps;
  }
};

// The taps of a block, in the order of steps within a chunk of channels: those that any of its row
// groups has. Axes that are split come first, so that steps of a stage are neighbours.
struct TapList {
  int bounds[kMaxAxes];  // most taps of a row group
  int count;
  int stage_steps;

  __device__ __forceinline__ TapList(Params const& p, int first_row_group, int groups) {
    RowGroup const one(p, first_row_group + int(threadIdx.x) % groups);
    count = stage_steps = 1;
#pragma unroll
    for (int a = 0; a < kMaxAxes; ++a) {
      bounds[a] = __reduce_max_sync(~0u, one.present ? one.phases[a].taps : 0);
      count *= bounds[a];
      if (!p.split[a]) stage_steps *= bounds[a];
    }
  }

  __device__ __forceinline__ void taps(int step, int (&tap)[kMaxAxes]) const {
    tap[2] = step % bounds[2];
    step /= bounds[2];
    tap[1] = step % bounds[1];
    tap[0] = step / bounds[1];
  }

  // Writes the list: of each step where it is in the packed filter of a chunk, then by row group
  // what it adds to a position of the box, in bytes, or kNoTap.
  __device__ __forceinline__ void write(Params const& p, int first_row_group, int groups,
                                        int* list) const {
    for (int i = threadIdx.x; i < count * groups; i += kThreads) {
      int const step = i / groups, group = i % groups;
      RowGroup const one(p, first_row_group + group);
      int tap[kMaxAxes];
      taps(step, tap);
      int index = 0, shift = 0;
#pragma unroll
      for (int a = 0; a < kMaxAxes; ++a) {
        Axis const& axis = p.axes[a];
        index = index * max(1, axis.taps) + tap[a];
        int const at = p.split[a] ? one.phases[a].shift - axis.lowest_shift
                                  : one.phases[a].shift - tap[a] * axis.sub_dilation - axis.lowest;
        shift = shift * p.box[a] + at;
      }
      list[step * (groups + 1)] = index;
      list[step * (groups + 1) + 1 + group] = one.has(tap) ? shift * kPitchBytes : kNoTap;
    }
  }
};

inline Params Params::of(Arguments const& a) {
  Config const& config = a.config;
  Problem const& c = config.problem;
  Schedule const& s = config.schedule;
  Params p{};
  p.input = a.input;
  p.filter = static_cast<unsigned char const*>(a.filter);
  p.bias = a.bias;
  p.scale = a.scale;
  p.shift = a.shift;
  p.output = a.output;
  p.partials = a.partials;
  for (int i = 0; i < kMaxAxes; ++i) {
    p.axes[i] = s.axes[i];
    p.tile[i] = s.tile[i];
    p.box[i] = s.box[i];
    p.split[i] = s.split[i];
  }
  p.lead = s.lead;
  p.channels = c.channels;
  p.output_channels = c.output_channels;
  p.groups = c.groups;
  p.channel_blocks = cutlass::FastDivmod(s.channel_blocks);
  p.phases_h = cutlass::FastDivmod(s.axes[1].phases);
  p.phases_w = cutlass::FastDivmod(s.axes[2].phases);
  p.row_groups = s.row_groups;
  p.width_phases = s.width_phases;
  p.chunks = s.chunks;
  p.list_bytes = s.list_bytes(config.row->groups);
  p.chunk_steps = s.stages * s.steps;
  p.channels_last = c.layout == Layout::kChannelsLast;
  p.activates_output = a.activates_output;
  p.activation = a.activation;
  p.partial_slots = config.partial_slots();
  int const element = config.traits().element_bytes();
  // Of neighbours in the output: whole vectors of a line within a tile, or of a pixel's channels.
  int const line = s.tile[2] * s.width_phases;
  int const widest = 16 / element;
  auto const allows = [&](int elements) {
    if (!device::is_aligned(a.output, elements * element)) return false;
    if (p.channels_last) return c.output_channels % elements == 0;
    bool const joined = s.width_phases == s.axes[2].problem.stride;
    return (joined || s.axes[2].positions == 1) && line % elements == 0 &&
           s.axes[2].problem.output % elements == 0;
  };
  p.output_vector = allows(widest) ? widest : allows(2) ? 2 : 1;
  p.blocks_m = cutlass::FastDivmod(s.blocks_m);
  p.conv_groups = cutlass::FastDivmod(c.groups);
  p.tiles_d = cutlass::FastDivmod(s.tiles[0]);
  p.tiles_h = cutlass::FastDivmod(s.tiles[1]);
  p.tiles_w = cutlass::FastDivmod(s.tiles[2]);
  p.tile_h = cutlass::FastDivmod(s.tile[1]);
  p.tile_w = cutlass::FastDivmod(s.tile[2]);
  p.box_h = cutlass::FastDivmod(s.box[1]);
  p.box_w = cutlass::FastDivmod(s.box[2]);
  p.box_positions = cutlass::FastDivmod(s.box_positions());
  p.line_vectors = cutlass::FastDivmod(std::max(1, line / p.output_vector));
  p.lines = cutlass::FastDivmod(s.tile[0] * s.tile[1]);
  p.pixel_vectors = cutlass::FastDivmod(kGroupRows / p.output_vector);
  p.width_phase = cutlass::FastDivmod(s.width_phases);
  return p;
}

}  // namespace fusedconv::conv::taps
