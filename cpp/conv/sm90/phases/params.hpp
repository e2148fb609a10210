// What the kernel is launched with, and a block's tiles.
#pragma once

#include <cstdint>

#include "conv/sm90/phases/rows.hpp"
#include "cutlass/fast_math.h"
#include "groupnorm/affine.hpp"

namespace fusedconv::conv::sm90::phases {

struct Params {
  unsigned char const* filter;
  void const* bias;
  float const* scale;
  float const* shift;
  void* output;
  groupnorm::Partial* partials;
  groupnorm::Affine affine;  // in front of the activation, where it has statistics
  Activation activation;
  int output_channels;
  int own_channels;  // of bias, scale and shift
  int channel_blocks, chunks, steps, stages;
  int stage_bytes, halo_bytes, kept_bytes, ring_offset, values_offset, barriers_offset;
  int shifts[kMaxAxes], outputs[kMaxAxes];
  int part_tiles, sample_tiles;
  int part_count;  // of all samples
  int part_step;   // blocks of each block of channels
  cutlass::FastDivmod parts, tiles_h, tiles_w;

  // blocks: of each block of channels.
  static Params of(Arguments const& a, int blocks);
};

// So many neighbouring tiles at a time. Where moments are taken, a sample has as many parts as it
// leaves partial moments of, else each tile is one.
inline int part_tiles_of(Arguments const& a) {
  return a.partials != nullptr ? a.config.schedule.part_tiles : 1;
}
inline int parts_of(Arguments const& a) {
  return int(ceil_div(a.config.schedule.sample_tiles(), part_tiles_of(a)));
}

inline Params Params::of(Arguments const& a, int blocks) {
  Config const& config = a.config;
  Schedule const& s = config.schedule;
  Params p{};
  p.filter = static_cast<unsigned char const*>(a.filter);
  p.bias = a.bias;
  p.scale = a.scale;
  p.shift = a.shift;
  p.output = a.output;
  p.partials = a.partials;
  if (a.norm != nullptr) {
    p.affine = groupnorm::affine_of(*a.norm, a.norm_weight, a.norm_bias, a.statistics);
  }
  p.activation = a.activation;
  p.output_channels = config.problem.output_channels;
  p.own_channels = a.own_channels > 0 ? a.own_channels : p.output_channels;
  p.channel_blocks = s.channel_blocks;
  p.chunks = s.chunks;
  p.steps = s.steps;
  p.stages = s.stages;
  p.stage_bytes = s.stage_bytes;
  p.halo_bytes = s.halo_rows * kRowBytes;
  p.kept_bytes = s.kept_bytes;
  p.ring_offset = s.ring_offset;
  p.values_offset = s.ring_offset + s.stages * s.stage_bytes;
  p.barriers_offset = p.values_offset + s.values_bytes;
  for (int i = 0; i < kMaxAxes; ++i) {
    p.shifts[i] = s.shift[i];
    p.outputs[i] = config.problem.axes[i].output;
  }
  p.part_tiles = part_tiles_of(a);
  p.sample_tiles = s.sample_tiles();
  p.part_count = a.batch * parts_of(a);
  p.part_step = blocks;
  p.parts = cutlass::FastDivmod(parts_of(a));
  p.tiles_h = cutlass::FastDivmod(s.tiles[1]);
  p.tiles_w = cutlass::FastDivmod(s.tiles[2]);
  return p;
}

// A block's parts. Neighbours have other channels of the same tiles, whose inputs the cache has.
struct Parts {
  int number, step, count;
  int sample, part, first_tile, end_tile;

  __device__ __forceinline__ explicit Parts(Params const& p)
      : number(int(blockIdx.x) / p.channel_blocks), step(p.part_step), count(p.part_count) {
    locate(p);
  }
  __device__ __forceinline__ bool present() const { return number < count; }
  __device__ __forceinline__ void advance(Params const& p, int ahead = 1) {
    number += ahead * step;
    locate(p);
  }

 private:
  __device__ __forceinline__ void locate(Params const& p) {
    p.parts(sample, part, number);
    first_tile = part * p.part_tiles;
    end_tile = min(first_tile + p.part_tiles, p.sample_tiles);
  }
};

// The first of a tile's positions, by axis.
struct Origin {
  int d, h, w;

  __device__ __forceinline__ Origin(Params const& p, int tile) {
    int rest;
    p.tiles_w(rest, w, tile);
    p.tiles_h(d, h, rest);
    h *= kEdge;
    w *= kEdge;
  }
};

}  // namespace fusedconv::conv::sm90::phases
