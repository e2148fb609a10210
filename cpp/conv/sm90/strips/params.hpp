// What the kernel is launched with, and the lines that a block goes through.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstdint>

#include "conv/sm90/arguments.hpp"
#include "conv/sm90/strips/rows.hpp"
#include "cutlass/fast_math.h"

namespace fusedconv::conv::sm90::strips {

struct Params {
  uint4 const* filter;
  void const* bias;
  int channels;  // of the output
  int height;
  int lower_h;
  int line_count;  // of the output, all samples'
  int sets;
  cutlass::FastDivmod strips, blocks_n, lines;  // lines: of a sample

  static Params of(Arguments const& a) {
    Config const& config = a.config;
    ConvProblem const& c = config.problem;
    Schedule const& s = config.schedule;
    Params p{};
    p.filter = static_cast<uint4 const*>(a.filter);
    p.bias = a.bias;
    p.channels = c.k;
    p.height = c.p;
    p.lower_h = c.lower_padding_h;
    p.line_count = int(int64_t(a.batch) * c.p);
    p.sets = std::min(s.sets, p.line_count);
    p.strips = cutlass::FastDivmod(s.strips);
    p.blocks_n = cutlass::FastDivmod(s.blocks_n);
    p.lines = cutlass::FastDivmod(c.p);
    return p;
  }
};

// Kernel parameters, hence a structure of its own.
struct Maps {
  CUtensorMap lines, tails, output;
};

// What a block has of all: a strip, and so many output channels.
struct Block {
  int strip, channel0, set;

  __device__ __forceinline__ explicit Block(Params const& p) {
    int rest, block_n;
    p.strips(rest, strip, int(blockIdx.x));
    p.blocks_n(set, block_n, rest);
    channel0 = block_n * kChannels;
  }
};

// Neighbouring lines of a sample, of those that a block has.
class Segments {
 public:
  __device__ __forceinline__ Segments(Params const& p, Block const& block)
      : next_(int(int64_t(p.line_count) * block.set / p.sets)),
        end_(int(int64_t(p.line_count) * (block.set + 1) / p.sets)) {}

  int sample, first, lines;

  // Whether there is another, which the members then tell of.
  __device__ __forceinline__ bool advance(Params const& p) {
    if (next_ >= end_) return false;
    p.lines(sample, first, next_);
    lines = min(p.height - first, end_ - next_);
    next_ += lines;
    return true;
  }

 private:
  int next_, end_;
};

// Where the n-th line of a block's input is in the ring.
struct Slot {
  int stage;
  uint32_t parity;

  __device__ __forceinline__ explicit Slot(uint32_t n)
      : stage(int(n % kStages)), parity(n / kStages & 1) {}
};

struct Barriers {
  uint64_t brought[kStages];  // a line is there
  uint64_t copied[kStages];   // and so are its copies
  uint64_t read[kStages];     // by all products
};
static_assert(sizeof(Barriers) <= kBarrierBytes);

}  // namespace fusedconv::conv::sm90::strips
