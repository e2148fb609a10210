// What the kernel is launched with, and the structures of its pipelines.
#pragma once

#include <cstdint>

#include "conv/sm90/runs/raster.hpp"
#include "conv/sm90/runs/rows.hpp"
#include "conv/sm90/wait.hpp"
#include "cutlass/fast_math.h"
#include "groupnorm/statistics.hpp"

namespace fusedconv::conv::sm90::runs {

struct Params {
  unsigned char const* filter;
  void const* bias;
  void* output;
  groupnorm::Partial* partials;
  unsigned* turns;  // by block of output channels
  Raster raster;
  int out_channels, pixels;
  // Of output channels, where phases interleave; and of which there are so many.
  cutlass::FastDivmod phases, phases_h, phases_w;
  int tensor_channels;
  int lower_d, lower_h, dilation_d, dilation_h;
  int depth_taps, filter_rows, k_blocks, k_iterations;
  int consumers;  // of a block
  bool streams_filter;
  int stages, box_bytes, filter_stage_bytes;
  int tile_count;  // of a block of output channels
  cutlass::FastDivmod blocks_n;
  bool activates_output;  // else only the moments are of activated values

  static Params of(Arguments const& arguments);
};

inline Params Params::of(Arguments const& a) {
  Config const& config = a.config;
  ConvProblem const& c = config.problem;
  Schedule const& s = config.schedule;
  Params p{};
  p.filter = static_cast<unsigned char const*>(a.filter);
  p.bias = a.bias;
  p.output = a.output;
  p.partials = a.partials;
  p.turns = reinterpret_cast<unsigned*>(const_cast<unsigned char*>(p.filter) + s.filter_bytes -
                                        s.blocks_n * int64_t(sizeof(unsigned)));
  p.raster = Raster::of(c, s, config.traits().element_bytes());
  p.out_channels = c.k;
  p.pixels = c.z * c.p * c.q;
  p.phases = cutlass::FastDivmod(config.phases.all());
  p.phases_h = cutlass::FastDivmod(config.phases.h);
  p.phases_w = cutlass::FastDivmod(config.phases.w);
  p.tensor_channels = c.k / config.phases.all();
  p.lower_d = c.lower_padding_d, p.lower_h = c.lower_padding_h;
  p.dilation_d = c.dilation_d, p.dilation_h = c.dilation_h;
  p.depth_taps = c.t;
  p.filter_rows = c.r;
  p.k_blocks = s.k_blocks;
  p.k_iterations = s.k_iterations;
  p.stages = s.stages;
  p.consumers = consumers_of(config.row->math);
  p.streams_filter = s.streams_filter;
  p.box_bytes = s.box_bytes;
  p.filter_stage_bytes = s.filter_stage_bytes;
  p.tile_count = counted_tiles(a, s.tiles);
  p.blocks_n = cutlass::FastDivmod(s.blocks_n);
  p.activates_output = a.activates_output;
  return p;
}

// By ring; the first serves a shared one.
struct alignas(16) Barriers {
  uint64_t full[kMaxConsumers][kMaxStages];
  uint64_t empty[kMaxConsumers][kMaxStages];
  uint64_t filter;
  int turn[kMaxConsumers][kMaxStages];  // of which a stage is; kNoTurn behind the last
};
inline constexpr int kNoTurn = -1;

// The start of shared memory.
struct Header {
  Barriers barriers;
  alignas(16) float bias[kBlockN];
};
static_assert(sizeof(Header) <= kHeaderBytes);

// Where a consumer finds what it reads, and from a stage to the next: addresses in shared memory,
// where header, filter, rings and moments follow each other. The stage of a shared ring holds the
// consumers' boxes and then its part of the filter.
struct Memory {
  uint32_t filter;  // all of it, or the first stage's
  uint32_t box;     // the first stage's
  int stage_stride;

  __device__ __forceinline__ Memory(Params const& p, uint32_t shared, int consumer) {
    filter = shared + kHeaderBytes;
    if (p.streams_filter) {
      box = filter + consumer * p.box_bytes;
      filter += p.consumers * p.box_bytes;
      stage_stride = p.consumers * p.box_bytes + p.filter_stage_bytes;
    } else {
      int const rings = p.k_iterations * p.filter_stage_bytes;
      box = filter + rings + consumer * p.stages * p.box_bytes;
      stage_stride = p.box_bytes;
    }
  }

  // From the start of shared memory to the moments.
  __device__ __forceinline__ static int moments(Params const& p) {
    int const filter_bytes = (p.streams_filter ? p.stages : p.k_iterations) * p.filter_stage_bytes;
    return kHeaderBytes + filter_bytes + p.consumers * p.stages * p.box_bytes;
  }
};

// Tiles, or those of a shared ring's consumers at once, go to whoever is free: warpgroups
// that drift apart would read lines that their neighbours' tiles share, and write to their cache
// lines, at different times, from and to memory. The counter is zero at first and again in the end.
struct Turns {
  unsigned* counter;
  int count;
  int next;

  __device__ __forceinline__ Turns(Params const& p, int block_n) : counter(p.turns + block_n) {
    count = p.streams_filter ? (p.tile_count + p.consumers - 1) / p.consumers : p.tile_count;
    take(p);
  }
  __device__ __forceinline__ void take(Params const& p) {
    next = int(atomicAdd(counter, 1u));
    // Each producer takes one turn too many; behind the last of them nobody takes any.
    int const producers =
        int(gridDim.x) / p.blocks_n.divisor * (p.streams_filter ? 1 : p.consumers);
    if (next == count + producers - 1) *counter = 0;
  }
};

}  // namespace fusedconv::conv::sm90::runs
