// What the kernel is launched with, and the structures of its pipelines.
#pragma once

#include <cstdint>

#include "conv/sm90/runs/raster.hpp"
#include "conv/sm90/runs/rows.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/fast_math.h"
#include "fusedconv/check.hpp"
#include "groupnorm/statistics.hpp"

namespace fusedconv::conv::sm90::runs {

struct Params {
  unsigned char const* filter;
  void const* bias;
  void* output;
  groupnorm::Partial* partials;
  Raster raster;
  int out_channels, pixels;
  int lower_d, lower_h, dilation_d, dilation_h;
  int depth_taps, filter_rows, k_blocks, k_iterations;
  int stages, stage_bytes, block_filter_bytes;
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
  p.raster = Raster::of(c, s, config.traits().element_bytes());
  p.out_channels = c.k;
  p.pixels = c.z * c.p * c.q;
  p.lower_d = c.lower_padding_d, p.lower_h = c.lower_padding_h;
  p.dilation_d = c.dilation_d, p.dilation_h = c.dilation_h;
  p.depth_taps = c.t;
  p.filter_rows = c.r;
  p.k_blocks = s.k_blocks;
  p.k_iterations = s.k_iterations;
  p.stages = s.stages;
  p.stage_bytes = s.stage_bytes;
  p.block_filter_bytes = s.block_filter_bytes;
  int64_t const tiles = int64_t(a.batch) * s.tiles;
  FUSEDCONV_CHECK(tiles < (int64_t(1) << 30), "sm90 runs: N=", a.batch, " C=", c.c, " K=", c.k,
                  " makes ", tiles, " tiles");
  p.tile_count = int(tiles);
  p.blocks_n = cutlass::FastDivmod(s.blocks_n);
  p.activates_output = a.activates_output;
  return p;
}

struct alignas(16) Barriers {
  uint64_t full[kConsumers][kMaxStages];
  uint64_t empty[kConsumers][kMaxStages];
  uint64_t filter;
};

// The start of shared memory.
struct Header {
  Barriers barriers;
  alignas(16) float bias[kBlockN];
};
static_assert(sizeof(Header) <= kHeaderBytes);

// With its loop inside one block of assembly: a loop of the compiler's changes how ptxas allots
// registers, which are scarce here.
__device__ __forceinline__ void wait_for(uint64_t const* barrier, uint32_t parity) {
  cutlass::arch::ClusterBarrier::wait(barrier, parity);
}

// The tiles that a warpgroup takes one after another. Neighbours go to warpgroups of one block,
// which share the lines between them in the cache.
struct Turns {
  int next, step;
  __device__ __forceinline__ Turns(Params const& p, int warpgroup) {
    int block, ignored;
    p.blocks_n(block, ignored, int(blockIdx.x));
    next = block * kConsumers + warpgroup;
    step = int(gridDim.x) / p.blocks_n.divisor * kConsumers;
  }
};

}  // namespace fusedconv::conv::sm90::runs
