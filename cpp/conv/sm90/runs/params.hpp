// What the kernel is launched with, and the structures of its pipelines.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

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
  TilePartial* partials;
  unsigned* turns;  // by block of output channels
  Raster raster;
  int out_channels, pixels;
  // Of output channels, where phases interleave; and of which there are so many.
  cutlass::FastDivmod phases, phases_h, phases_w;
  int tensor_channels;
  // Where phases have taps of their own.
  PhaseBlocks phase_blocks;
  int first_block[kMostRowPhases * kMostRowPhases + 1];  // of a launch's, by phase
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

// Blocks of a launch for each block of columns, by phase along depth and height: as many of
// `multiprocessors` as its steps are of all, and no more than it has turns.
inline std::vector<int> shares_of(Schedule const& s, int multiprocessors, int turns) {
  // What the epilogue takes, in steps.
  constexpr int kTileSteps = 12;
  int const channel_blocks = s.phase_blocks.channel_blocks;
  auto const steps = [&](std::size_t i) { return int64_t(s.block_steps[i].all()) + kTileSteps; };
  int64_t all = 0;
  for (std::size_t i = 0; i < s.block_steps.size(); ++i) all += steps(i) * channel_blocks;
  std::vector<int> shares;
  int left = multiprocessors;
  for (std::size_t i = 0; i < s.block_steps.size(); ++i) {
    shares.push_back(
        int(std::clamp<int64_t>(multiprocessors * steps(i) / all, 1, std::max(1, turns))));
    left -= shares.back() * channel_blocks;
  }
  while (left >= channel_blocks) {
    // One more for the phase whose blocks would be the last.
    int longest = -1;
    int64_t most = 0;
    for (std::size_t i = 0; i < shares.size(); ++i) {
      int64_t const time = steps(i) * ceil_div(turns, shares[i]);
      if (shares[i] < turns && time > most) {
        most = time;
        longest = int(i);
      }
    }
    if (longest < 0) break;
    ++shares[longest];
    left -= channel_blocks;
  }
  return shares;
}

// Of a block of columns: what its producers take one after the other.
inline int turns_of(Params const& p) {
  return int(ceil_div(p.tile_count, p.streams_filter ? p.consumers : 1));
}

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
  p.phases_h = cutlass::FastDivmod(config.phases.h.count);
  p.phases_w = cutlass::FastDivmod(config.phases.w.count);
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
  p.phase_blocks = s.phase_blocks;
  if (s.phase_blocks.present()) {
    int const turns = turns_of(p);
    std::vector<int> const shares = shares_of(s, config.multiprocessors, turns);
    for (std::size_t i = 0; i < shares.size(); ++i) {
      p.first_block[i + 1] = p.first_block[i] + shares[i] * s.phase_blocks.channel_blocks;
    }
  }
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

// A block of columns, by a block of the launch: its number, its first output channel, how many
// blocks share it, and what filter it has. kOwnTaps: phases have taps of their own; else it is
// known when the kernel is launched.
template <bool kOwnTaps>
struct Block;

template <>
struct Block<false> {
  Params const& p;
  int number, channel0, sets;

  __device__ __forceinline__ explicit Block(Params const& p) : p(p) {
    int ignored;
    p.blocks_n(ignored, number, int(blockIdx.x));
    channel0 = number * kBlockN;
    sets = int(gridDim.x) / p.blocks_n.divisor;
  }
  __device__ __forceinline__ int lower_d() const { return p.lower_d; }
  __device__ __forceinline__ int lower_h() const { return p.lower_h; }
  __device__ __forceinline__ int depth_taps() const { return p.depth_taps; }
  __device__ __forceinline__ int filter_rows() const { return p.filter_rows; }
  __device__ __forceinline__ int k_iterations() const { return p.k_iterations; }
  __device__ __forceinline__ int filter_stage_bytes() const { return p.filter_stage_bytes; }
};

template <>
struct Block<true> {
  int number, channel0, sets;
  int phase_d, phase_h;
  PhaseBlocks::Taps depth, height;
  int iterations, stage_bytes;

  __device__ __forceinline__ explicit Block(Params const& p) {
    int phase = 0;
    while (int(blockIdx.x) >= p.first_block[phase + 1]) ++phase;
    int const channel_blocks = p.phase_blocks.channel_blocks;
    int const channel_block = (int(blockIdx.x) - p.first_block[phase]) % channel_blocks;
    number = phase * channel_blocks + channel_block;
    channel0 = channel_block * p.phase_blocks.channels();
    sets = (p.first_block[phase + 1] - p.first_block[phase]) / channel_blocks;
    p.phases_h(phase_d, phase_h, phase);
    depth = p.phase_blocks.depth[phase_d];
    height = p.phase_blocks.height[phase_h];
    iterations = depth.count * p.k_blocks;
    iterations += iterations & height.count & 1;
    stage_bytes = p.filter_stage_bytes / p.filter_rows * height.count;
  }
  __device__ __forceinline__ int lower_d() const { return -depth.lowest; }
  __device__ __forceinline__ int lower_h() const { return -height.lowest; }
  __device__ __forceinline__ int depth_taps() const { return depth.count; }
  __device__ __forceinline__ int filter_rows() const { return height.count; }
  __device__ __forceinline__ int k_iterations() const { return iterations; }
  __device__ __forceinline__ int filter_stage_bytes() const { return stage_bytes; }
};

// Tiles, or those of a shared ring's consumers at once, go to whoever is free: warpgroups
// that drift apart would read lines that their neighbours' tiles share, and write to their cache
// lines, at different times, from and to memory. The counter is zero at first and again in the end.
struct Turns {
  unsigned* counter;
  int count;
  int next;
  int producers;

  // sets: blocks that share them.
  __device__ __forceinline__ Turns(Params const& p, int block_n, int sets)
      : counter(p.turns + block_n), producers(sets * (p.streams_filter ? 1 : p.consumers)) {
    count = p.streams_filter ? (p.tile_count + p.consumers - 1) / p.consumers : p.tile_count;
    take();
  }
  __device__ __forceinline__ void take() {
    next = int(atomicAdd(counter, 1u));
    // Each producer takes one turn too many; behind the last of them nobody takes any.
    if (next == count + producers - 1) *counter = 0;
  }
};

}  // namespace fusedconv::conv::sm90::runs
