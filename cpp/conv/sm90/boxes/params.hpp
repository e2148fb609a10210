// What the kernel is launched with, and where a block's work is in it.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <type_traits>

#include "conv/block_item.hpp"
#include "conv/sm90/boxes/rows.hpp"
#include "cutlass/fast_math.h"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90::boxes {

// A tap: how far its positions are shifted, and the source that they are read from.
struct alignas(8) TapCopy {
  int16_t shift[kMaxAxes];
  int16_t source;
};

struct Params {
  unsigned char const* filter;
  void const* bias;
  float const* scale;
  float const* shift;
  PixelNorm norm;
  GroupStatistics group;
  groupnorm::Partial* partials;
  bool channels_last, saves;
  bool packed;                    // the filter, else the weight is read as it lies
  int line_bytes, line_shift;     // of a filter's line, and columns, two to this
  bool stores, activates_output;  // where moments are taken
  bool is_linear;                 // there is a bias, scale or shift
  bool keeps_values;              // what is added to columns and multiplied is that of all tiles
  Activation activation;
  int output_channels;
  int own_channels;  // of bias, scale and shift
  int tile_count, slab_count, blocks, sets;
  int outputs[kMostPhases][kMaxAxes];  // positions of each phase that are pixels
  int least_outputs[kMaxAxes];         // of all phases
  int chunks, stages;
  int segment, store_shift;
  int piece_shift;        // channels first: positions of a copy's line, two to this
  int positions;          // of a slab
  int box_bytes;          // of a slab's copy
  int halo_bytes;         // that it has room for, where there are halos
  int eights_bytes;       // then: from eight of the instruction's rows to the next
  int box[kMaxAxes + 1];  // positions of a slab, and samples
  Memory memory;
  cutlass::FastDivmod group_channels, channel_blocks, segments, slabs_d, slabs_h, slabs_w, box_w,
      box_lines;
  uint8_t first_phase[kMostPhases], set_phases[kMostPhases];  // by set
  uint8_t first_tap[kMostPhases], set_taps[kMostPhases];
  uint16_t first_row[kMostPhases], set_rows[kMostPhases];
  TapCopy taps[kMostTaps];
  uint16_t masks[kMostTaps];
  uint16_t offsets[kMostTaps];  // in a box with a halo, in rows
  bool starts_box[kMostTaps];   // or that of the tap before has what it reads
  // Of a weight's copies, where it scatters: its taps, by phase of each tap.
  uint16_t first_filter_tap[kMostTaps];
  uint16_t filter_taps[kMostFilterTaps];

  // slabs: those of the arguments' batch.
  static Params of(Arguments const& arguments, Slabs const& slabs);

 private:
  void set_halos(Schedule const& s, Slabs const& slabs);
};

// Tiles of positions for blocks of columns.
struct AllItems : BlockItems {
  __device__ __forceinline__ AllItems(Params const& p)
      : BlockItems(int(blockIdx.x), int(gridDim.x), p.tile_count, p.blocks) {}
};

// Of one block of columns. Neighbours have the others of the same tiles, which the cache then has.
class ColumnItems {
 public:
  int tile, block;

  __device__ __forceinline__ ColumnItems(Params const& p)
      : tile(int(blockIdx.x) / p.blocks),
        block(int(blockIdx.x) % p.blocks),
        count_(p.tile_count),
        step_(int(gridDim.x) / p.blocks) {}

  __device__ __forceinline__ bool present() const { return tile < count_; }
  __device__ __forceinline__ void advance(int count = 1) { tile += count * step_; }

 private:
  int count_, step_;
};

template <class Traits>
using Items = std::conditional_t<Traits::kStationary, ColumnItems, AllItems>;

// A block of columns.
struct Block {
  int set, channel;
  int first_tap, taps;
  int64_t filter;  // the first of its rows of the packed filter

  __device__ __forceinline__ Block(Params const& p, int index) {
    int channel_block;
    p.channel_blocks(set, channel_block, index);
    channel = channel_block * p.segment;
    first_tap = p.first_tap[set];
    taps = p.set_taps[set];
    filter = (int64_t(p.first_row[set]) * p.channel_blocks.divisor +
              int64_t(channel_block) * p.set_rows[set]) *
             p.chunks;
  }
};

// Where a slab lies: the first of its positions, by axis, and its first sample.
struct Slab {
  bool present;
  int number;
  int origin[kMaxAxes];
  int sample;

  __device__ __forceinline__ Slab(Params const& p, int number)
      : present(number < p.slab_count), number(number) {
    int rest, d, h, w;
    p.slabs_w(rest, w, number);
    p.slabs_h(rest, h, rest);
    p.slabs_d(sample, d, rest);
    origin[0] = d * p.box[0];
    origin[1] = h * p.box[1];
    origin[2] = w * p.box[2];
    sample *= p.box[kMaxAxes];
  }
};

// Taps of a plane are neighbours, and read a box that begins where the set's lowest would.
inline void Params::set_halos(Schedule const& s, Slabs const& slabs) {
  for (PhaseSet const& set : s.sets) {
    for (int tap = set.first_tap; tap < set.first_tap + set.taps; ++tap) {
      starts_box[tap] = tap == set.first_tap || s.taps[tap][0] != s.taps[tap - 1][0];
      int offset = 0;
      for (int axis = 1; axis < kMaxAxes; ++axis) {
        offset += (s.taps[tap][axis] - set.lowest[axis]) * slabs.pitch(axis);
        taps[tap].shift[axis] = set.lowest[axis];
      }
      offsets[tap] = uint16_t(offset);
    }
  }
}

inline Params Params::of(Arguments const& a, Slabs const& slabs) {
  Config const& config = a.config;
  Schedule const& s = config.schedule;
  Params p{};
  p.filter = static_cast<unsigned char const*>(a.filter);
  p.bias = a.bias;
  p.scale = a.scale;
  p.shift = a.shift;
  p.is_linear = a.bias != nullptr || a.scale != nullptr || a.shift != nullptr;
  if (a.norm != nullptr) p.norm = *a.norm;
  if (a.group != nullptr) p.group = *a.group;
  p.keeps_values = config.row->shape.stationary && a.group == nullptr && a.saved == nullptr;
  p.group_channels = cutlass::FastDivmod(std::max(1, p.group.channels));
  p.partials = a.partials;
  p.stores = a.output != nullptr;
  p.activates_output = a.activates_output;
  p.activation = a.activation;
  p.channels_last = s.layout == Layout::kChannelsLast;
  p.saves = a.saved != nullptr;
  p.packed = a.weight == nullptr;
  int const element = config.traits().element_bytes();
  p.line_bytes = s.line * element;
  p.line_shift = std::countr_zero(unsigned(s.line));
  p.output_channels = config.problem.output_channels;
  p.own_channels = a.own_channels > 0 ? a.own_channels : p.output_channels;
  FUSEDCONV_CHECK(slabs.all() * s.blocks <= kMostItems, config.row->name,
                  ": slabs by blocks of columns: got ", slabs.all() * s.blocks,
                  ", expected at most ", kMostItems);
  p.slab_count = int(slabs.all());
  p.tile_count = int(ceil_div(slabs.all(), config.row->shape.slabs()));
  p.blocks = s.blocks;
  p.sets = int(s.sets.size());
  for (int axis = 0; axis < kMaxAxes; ++axis) {
    for (std::size_t i = 0; i < s.phases.size(); ++i) {
      int const outputs = s.axes[axis].phase(s.phases[i][axis]).outputs;
      p.outputs[i][axis] = outputs;
      p.least_outputs[axis] = i == 0 ? outputs : std::min(p.least_outputs[axis], outputs);
    }
  }
  p.chunks = s.chunks;
  p.stages = s.stages;
  p.segment = s.segment;
  p.store_shift = std::countr_zero(unsigned(s.store_columns));
  p.piece_shift = std::countr_zero(unsigned(std::min(s.store_positions, slabs.box[2])));
  p.positions = slabs.positions();
  p.box_bytes = slabs.copied() * kChunkBytes;
  p.halo_bytes = s.halo_bytes;
  p.eights_bytes = slabs.eights_pitch() * kChunkBytes;
  std::copy(slabs.box.begin(), slabs.box.end(), p.box);
  p.memory = Memory::of(config.row->shape, s.stages, s.kept_bytes, s.halo_bytes);
  p.channel_blocks = cutlass::FastDivmod(s.channel_blocks);
  p.segments = cutlass::FastDivmod(s.segment);
  p.slabs_d = cutlass::FastDivmod(slabs.count[0]);
  p.slabs_h = cutlass::FastDivmod(slabs.count[1]);
  p.slabs_w = cutlass::FastDivmod(slabs.count[2]);
  p.box_lines = cutlass::FastDivmod(slabs.box[0] * slabs.box[1]);
  p.box_w = cutlass::FastDivmod(slabs.box[2]);
  for (std::size_t i = 0; i < s.sets.size(); ++i) {
    p.first_phase[i] = uint8_t(s.sets[i].first);
    p.set_phases[i] = uint8_t(s.sets[i].count);
    p.first_tap[i] = uint8_t(s.sets[i].first_tap);
    p.set_taps[i] = uint8_t(s.sets[i].taps);
    p.first_row[i] = uint16_t(s.sets[i].first_row);
    p.set_rows[i] = uint16_t(s.sets[i].rows);
  }
  for (std::size_t i = 0; i < s.taps.size(); ++i) {
    std::copy(s.taps[i].begin(), s.taps[i].end(), p.taps[i].shift);
    p.taps[i].source = s.tap_sources.empty() ? 0 : s.tap_sources[i];
  }
  if (config.row->shape.halo) p.set_halos(s, slabs);
  std::copy(s.masks.begin(), s.masks.end(), p.masks);
  std::copy(s.first_filter_taps.begin(), s.first_filter_taps.end(), p.first_filter_tap);
  std::copy(s.filter_taps.begin(), s.filter_taps.end(), p.filter_taps);
  return p;
}

}  // namespace fusedconv::conv::sm90::boxes
