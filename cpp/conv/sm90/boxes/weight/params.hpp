// What the kernel is launched with, and where a block's work is in it.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstdint>

#include "conv/sm90/boxes/weight/rows.hpp"
#include "cutlass/fast_math.h"

namespace fusedconv::conv::sm90::boxes::weight {

// Boxes of a slab and a unit's channels: of the input, and of each phase of the gradient.
struct Maps {
  CUtensorMap input;
  CUtensorMap sources[kMostPhases];
};

struct Params {
  float* partials;
  void* grad_weight;            // in place of these, or null
  FilterSource weight;          // how that lies
  unsigned char const* packed;  // the input, where it is
  float* bias_sums;             // of a channel its parts beside each other
  int bias_channels, bias_parts, taps_read;
  int splits, stages, stage_bytes;
  int64_t slabs;
  int units;         // of all taps
  int all_channels;  // of the input, times kUnit
  int box_bytes;     // of the gradient or the input
  // Of the gradient with a halo: what is copied, a line of it, and from a tap to the next and to
  // the next line's.
  int halo_bytes, line_bytes, tap_bytes, tap_line_bytes;
  bool taps_by_chunk;  // units of all taps are beside each other, by output channels
  int box[kMaxAxes + 1];
  cutlass::FastDivmod tasks, channel_blocks, unit_parts, weight_s, weight_r;
  cutlass::FastDivmod slabs_d, slabs_h, slabs_w;
  Tap taps[kMostTaps];
  uint8_t tap_sources[kMostTaps];

  static Params of(Arguments const& arguments);
};

inline Params Params::of(Arguments const& a) {
  Schedule const& s = a.config.schedule;
  Params p{};
  p.partials = a.partials;
  if (a.grad_weight != nullptr) {
    p.grad_weight = a.grad_weight;
    p.weight = *a.weight;
    p.weight_s = cutlass::FastDivmod(int(p.weight.s));
    p.weight_r = cutlass::FastDivmod(int(p.weight.r));
  }
  if (a.config.row->block.packs()) p.packed = static_cast<unsigned char const*>(a.input);
  p.bias_sums = a.bias_sums;
  p.bias_channels = a.bias_channels;
  p.bias_parts = s.bias_parts;
  p.taps_read = int(s.gather.taps.size());
  p.splits = s.splits;
  p.stages = s.stages;
  p.slabs = s.slabs.all();
  p.units = s.units;
  p.all_channels = s.all_channels;
  p.box_bytes = s.slabs.positions() * kChunkBytes;
  p.halo_bytes = s.slabs.copied() * kChunkBytes;
  p.stage_bytes = s.stage_bytes;
  p.line_bytes = s.slabs.pitch(1) * kChunkBytes;
  if (a.config.row->block.halo) {
    p.taps_by_chunk = true;
    p.tap_line_bytes = a.config.problem.axes[1].dilation * p.line_bytes;
    p.tap_bytes = a.config.problem.axes[2].dilation * kChunkBytes;
  }
  std::copy(s.slabs.box.begin(), s.slabs.box.end(), p.box);
  p.tasks = cutlass::FastDivmod(s.tasks);
  p.channel_blocks = cutlass::FastDivmod(s.channel_blocks);
  p.unit_parts = cutlass::FastDivmod(a.config.row->block.halo ? p.taps_read : s.unit_chunks);
  p.slabs_d = cutlass::FastDivmod(s.slabs.count[0]);
  p.slabs_h = cutlass::FastDivmod(s.slabs.count[1]);
  p.slabs_w = cutlass::FastDivmod(s.slabs.count[2]);
  std::copy(s.gather.taps.begin(), s.gather.taps.end(), p.taps);
  std::copy(s.gather.tap_sources.begin(), s.gather.tap_sources.end(), p.tap_sources);
  return p;
}

// Blocks of a split are neighbours, and read the same slabs at the same time.
struct BlockWork {
  int split, task;

  __device__ __forceinline__ explicit BlockWork(Params const& p) {
    p.tasks(split, task, int(blockIdx.x));
  }
  // The slabs that fall to a block.
  __device__ __forceinline__ int first(Params const& p) const {
    return int(p.slabs * split / p.splits);
  }
  __device__ __forceinline__ int last(Params const& p) const {
    return int(p.slabs * (split + 1) / p.splits);
  }
};

// Which of the blocks of input channels and of units a task is.
struct Task {
  int channel_block, unit_block;

  __device__ __forceinline__ Task(Params const& p, int index) {
    p.channel_blocks(unit_block, channel_block, index);
  }
};

// A unit of all taps: its tap and the first of its output channels. Those of a tap are beside each
// other, or with halos those of all taps.
struct Unit {
  int tap, channel;

  __device__ __forceinline__ Unit(Params const& p, int index) {
    if (p.taps_by_chunk) {
      p.unit_parts(channel, tap, index);
    } else {
      p.unit_parts(tap, channel, index);
    }
    channel *= kUnit;
  }
};

// Where a slab begins: by depth, height, width and sample.
struct Origin {
  int d, h, w, sample;

  __device__ __forceinline__ Origin(Params const& p, int slab) {
    int rest;
    p.slabs_w(rest, w, slab);
    p.slabs_h(rest, h, rest);
    p.slabs_d(sample, d, rest);
    d *= p.box[0];
    h *= p.box[1];
    w *= p.box[2];
    sample *= p.box[kMaxAxes];
  }
};

// Which of a unit's output channels is a row of the instruction's registers: threads load rows so
// that those of a warp lie in different banks.
CUTLASS_HOST_DEVICE int channel_of_row(int warp, int lower_row, int quad) {
  return lower_row * (kUnit / 2) + (warp + 4 * (quad >> 2)) * 4 + (quad & 3);
}

// Where a split finds the partial sums of a task, accumulators in fours, each thread's beside the
// next one's. To be read by AddPartials.
__device__ __forceinline__ int64_t partial_index(Params const& p, int task, int split,
                                                 Block const& block) {
  return (int64_t(task) * p.splits + split) * (block.channels * block.units * kUnit * kUnit);
}

}  // namespace fusedconv::conv::sm90::boxes::weight
