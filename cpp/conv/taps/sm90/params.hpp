// What the kernel is launched with, and where a block's work is in it.
#pragma once

#include <bit>
#include <cstdint>

#include "conv/block_item.hpp"
#include "conv/taps/sm90/rows.hpp"
#include "cuda/math.hpp"
#include "cuda/tile.hpp"
#include "cutlass/fast_math.h"

namespace fusedconv::conv::taps::sm90 {

struct Params {
  void const* input;
  unsigned char const* filter;
  void const* bias;
  float const* scale;
  float const* shift;
  void* output;
  groupnorm::Partial* partials;
  Axis axes[kMaxAxes];
  int tile[kMaxAxes], box[kMaxAxes], lead;
  Order order;
  Loads loads;
  bool shares_rows, joins_groups, joins_samples, channels_last, activates_output;
  bool stores_whole;  // vectors
  int store_columns;  // channels first: columns of a store
  Activation activation;
  int batch, channels, output_channels;  // channels of a convolution group
  int group_phases, group_channels, units, block_units;
  int positions, pieces, chunks, last_steps;  // steps: of the last chunk
  int stages, block_taps;
  int slots;  // of the filter's ring; where consumers have rows of their own, of each one's
  Memory memory;
  int tile_count, blocks;  // blocks: of rows, in all convolution groups
  int split_shift;         // blocks of a cluster, which share an item's channels: two to this
  int64_t partial_slots;   // of a sample
  cutlass::FastDivmod blocks_m, channel_blocks, phase_sets, phases_h;
  cutlass::FastDivmod tiles_d, tiles_h, tiles_w, box_h, box_w, plane, pixels_h, pixels_w;
  uint16_t first_tap[kMostLists + 1];
  // A tap's place in the box, in positions.
  int16_t offset[kMostTaps];

  static Params of(Arguments const& arguments);
};

// Tiles of positions for blocks of rows, of which the blocks of a cluster share the channels.
struct Items : BlockItems {
  __device__ __forceinline__ Items(Params const& p)
      : BlockItems(int(blockIdx.x) >> p.split_shift, int(gridDim.x) >> p.split_shift, p.tile_count,
                   p.blocks) {}
};

// Chunks of channels that a block multiplies: all, or its share of a cluster's.
struct Share {
  int first = 0, end;

  __device__ __forceinline__ Share(Params const& p, bool splits_channels) : end(p.chunks) {
    if (!splits_channels) return;
    int const splits = 1 << p.split_shift, rank = int(blockIdx.x) & (splits - 1);
    first = p.chunks * rank >> p.split_shift;
    end = p.chunks * (rank + 1) >> p.split_shift;
  }
};

// Where an item lies.
struct Place {
  int sample, group, block_m;
  int origin[kMaxAxes];  // of boxes: the tile's first position
  int first;             // of lines: the tile's first pixel, counted from the sample's
  int pixels;            // of lines: so counted, behind the last
  int tile_index;        // in the sample

  __device__ __forceinline__ Place(Params const& p, Items const& item, int columns) {
    p.blocks_m(group, block_m, item.block);
    if (p.order == Order::kLine) {
      if (p.joins_samples) {
        int64_t const start = int64_t(item.tile) * columns;
        sample = int(start / p.plane.divisor);
        first = int(start % p.plane.divisor);
        int64_t const left = int64_t(p.batch - sample) * p.plane.divisor;
        pixels = int(min(left, int64_t(first) + columns));
        tile_index = 0;
      } else {
        p.tiles_w(sample, tile_index, item.tile);
        first = tile_index * columns;
        pixels = p.plane.divisor;
      }
      origin[0] = origin[1] = origin[2] = 0;
      return;
    }
    int rest, td, th, tw;
    p.tiles_w(rest, tw, item.tile);
    p.tiles_h(rest, th, rest);
    p.tiles_d(sample, td, rest);
    tile_index = (td * p.tiles_h.divisor + th) * p.tiles_w.divisor + tw;
    origin[0] = td * p.tile[0];
    origin[1] = th * p.tile[1];
    origin[2] = tw * p.tile[2];
    first = pixels = 0;
  }
};

// A row group of a consumer: channels, and phases of the output.
struct RowGroup {
  bool present;
  int residue[kMaxAxes];
  int channel;  // the first, of the convolution group
  int list;     // of taps

  RowGroup() = default;
  // consumer, index: the row group's place in the block.
  __device__ __forceinline__ RowGroup(Params const& p, int block_m, int consumer, int index,
                                      int row_groups) {
    int const own = p.joins_groups ? 0 : index;
    int const each = p.joins_groups ? 1 : row_groups;
    int const unit = block_m * p.block_units + (p.shares_rows ? 0 : consumer * each) + own;
    present = unit < p.units;
    int rest, set, joined = p.joins_groups ? index : 0;
    p.channel_blocks(rest, channel, present ? unit : 0);
    channel *= p.group_channels;
    list = p.joins_groups ? rest * row_groups + joined : rest;
    p.phase_sets(rest, set, rest);
    p.phases_h(residue[0], residue[1], rest);
    residue[2] = (p.joins_groups ? set * row_groups + joined : set) * p.group_phases;
  }
  __device__ __forceinline__ int first_tap(Params const& p) const { return p.first_tap[list]; }
  __device__ __forceinline__ int taps(Params const& p) const {
    return present ? p.first_tap[list + 1] - p.first_tap[list] : 0;
  }
};

// How many blocks of the filter the consumers take of a chunk: where they share rows, both take
// all; else they take turns while both have some left.
struct Stream {
  int counts[kConsumers] = {};
  int total = 0;

  __device__ __forceinline__ Stream(Params const& p, int block_m, int row_groups) {
#pragma unroll
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      for (int i = 0; i < row_groups; ++i) {
        counts[consumer] += RowGroup(p, block_m, consumer, i, row_groups).taps(p);
      }
    }
    total = p.shares_rows ? counts[0] : counts[0] + counts[1];
  }
  // Whose block of the stream it is; where rows are shared, both take it.
  __device__ __forceinline__ int consumer_of(Params const& p, int index) const {
    if (p.shares_rows) return 0;
    if (index < 2 * min(counts[0], counts[1])) return index % 2;
    return counts[0] > counts[1] ? 0 : 1;
  }
};

// Which row a lane's accumulators of a row group belong to: its phase within the group along width
// and its channel. Channels first, a warp has all phases of its channels; channels last, phases are
// far apart, so that a warp has as many neighbouring channels as it can.
struct RowPlace {
  int phase, channel;

  __device__ __forceinline__ RowPlace(Params const& p, int row) {
    if (p.channels_last) {
      phase = row / p.group_channels;
      channel = row % p.group_channels;
    } else {
      int const each = kWarpRows / p.group_phases;
      phase = row % kWarpRows / each;
      channel = row / kWarpRows * each + row % each;
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
  int64_t plane = 1;
  for (int i = 0; i < kMaxAxes; ++i) {
    p.axes[i] = s.axes[i];
    p.tile[i] = s.tile[i];
    p.box[i] = s.box[i];
    plane *= c.axes[i].input;
  }
  p.lead = s.lead;
  p.order = s.order;
  p.loads = s.loads;
  p.shares_rows = s.shares_rows;
  p.joins_groups = s.joins_groups;
  p.channels_last = c.layout == Layout::kChannelsLast;
  p.activates_output = a.activates_output;
  p.activation = a.activation;
  p.batch = a.batch;
  p.channels = c.channels;
  p.output_channels = c.output_channels;
  p.group_phases = s.group_phases;
  p.group_channels = s.group_channels;
  p.units = s.units;
  p.block_units = s.block_units;
  int const element = config.traits().element_bytes();
  p.joins_samples = config.joins_samples(a.partials != nullptr);
  // Neighbours in the output: a channel's phases of a position, or a pixel's channels.
  AxisProblem const& width = c.axes[2];
  int const neighbours = p.channels_last ? 16 / element : std::min(s.joined(), 16 / element);
  p.stores_whole = device::is_aligned(a.output, neighbours * element) &&
                   (p.channels_last ? c.output_channels % neighbours == 0
                                    : s.joined() == width.stride && width.output % neighbours == 0);
  // Neighbours in the output are so in the tile where lines are cut between stores.
  auto const joins = [&](int count) {
    bool const lines = s.order == Order::kLine
                           ? plane % count == 0 && c.axes[2].input % count == 0
                           : s.axes[2].positions % count == 0 && s.tile[2] % count == 0 &&
                                 (s.order != Order::kBoxes || s.box[2] % count == 0);
    int const elements = count * s.joined();
    return p.stores_whole && !p.channels_last && elements * element <= 16 && lines &&
           int64_t(s.axes[2].positions) * width.stride == width.output &&
           width.output % elements == 0 && device::is_aligned(a.output, elements * element);
  };
  p.store_columns = joins(4) ? 4 : joins(2) ? 2 : 1;
  p.positions = s.positions;
  p.pieces = s.pieces;
  p.chunks = s.chunks;
  int const last = c.channels * element - (s.chunks - 1) * s.pieces * 16;
  p.last_steps = int(ceil_div(last, kStepBytes));
  p.stages = s.stages;
  p.slots = s.shares_rows ? s.slots : s.slots / kConsumers;
  p.block_taps = s.block_taps;
  p.memory =
      Memory::of(s.positions, s.pieces, s.stages, s.slots, config.row->math, config.row->shape);
  int64_t const tiles = config.tiles(a.batch, a.partials != nullptr);
  FUSEDCONV_CHECK(tiles * s.blocks_m * c.groups <= kMostItems, config.row->name,
                  ": tiles by blocks of rows: got ", tiles * s.blocks_m * c.groups,
                  ", expected at most ", kMostItems);
  p.tile_count = int(tiles);
  p.blocks = s.blocks_m * c.groups;
  p.split_shift = std::bit_width(unsigned(config.splits())) - 1;
  p.partial_slots = config.partial_slots();
  p.blocks_m = cutlass::FastDivmod(s.blocks_m);
  p.channel_blocks = cutlass::FastDivmod(s.channel_blocks);
  p.phase_sets = cutlass::FastDivmod(s.phase_sets);
  p.phases_h = cutlass::FastDivmod(s.axes[1].phases);
  p.tiles_d = cutlass::FastDivmod(s.tiles[0]);
  p.tiles_h = cutlass::FastDivmod(s.tiles[1]);
  p.tiles_w = cutlass::FastDivmod(s.tiles[2]);
  p.box_h = cutlass::FastDivmod(s.box[1]);
  p.box_w = cutlass::FastDivmod(s.order == Order::kBoxes ? s.box[2] : 8);
  p.plane = cutlass::FastDivmod(int(plane));
  p.pixels_h = cutlass::FastDivmod(c.axes[1].input);
  p.pixels_w = cutlass::FastDivmod(c.axes[2].input);
  std::copy(s.first_tap.begin(), s.first_tap.end(), p.first_tap);
  for (std::size_t i = 0; i < s.taps.size(); ++i) {
    int at = 0;
    for (int axis = 0; axis < kMaxAxes; ++axis) {
      at = at * s.box[axis] + s.taps[i][axis] - s.axes[axis].lowest;
    }
    p.offset[i] = int16_t(at);
  }
  return p;
}

}  // namespace fusedconv::conv::taps::sm90
