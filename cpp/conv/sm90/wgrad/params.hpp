// What the kernel is launched with, and the structures of its pipeline.
#pragma once

#include <cstdint>

#include "conv/sm90/wait.hpp"
#include "conv/sm90/wgrad/rows.hpp"
#include "cutlass/fast_math.h"

namespace fusedconv::conv::sm90::wgrad {

struct Params {
  float* partials;
  int units;                // strips of all samples and slices
  int h;                    // the input's rows: of a unit
  int columns;              // of the filter
  int groups;               // of output channels; a warpgroup for each column or group
  int pad_d, pad_h, pad_w;  // of the transposed convolution
  int dilation_d;
  int lead, pitch_bytes, stages;
  int splits;
  int flush_steps;  // whole turns of the consumers' loop
  cutlass::FastDivmod strips, slices;
  cutlass::FastDivmod tasks, blocks_c, blocks_k;

  static Params of(Arguments const& arguments);

  CUTLASS_HOST_DEVICE int warpgroups() const { return columns * groups; }
};

inline Params Params::of(Arguments const& a) {
  ConvProblem const& c = a.config.problem;
  Schedule const& s = a.config.schedule;
  Params p{};
  p.partials = a.partials;
  p.units = c.n * c.d * s.strips;
  p.h = c.h;
  p.columns = c.s;
  p.groups = s.groups;
  p.pad_d = c.dilation_d * (c.t - 1) - c.lower_padding_d;
  p.pad_h = c.r - 1 - c.lower_padding_h;
  p.pad_w = c.s - 1 - c.lower_padding_w;
  p.dilation_d = c.dilation_d;
  p.lead = s.lead;
  p.pitch_bytes = s.pitch_bytes;
  p.stages = s.stages;
  p.splits = s.splits;
  p.flush_steps = s.parts == 2 ? kSplitFlushSteps : kFlushSteps;
  p.strips = cutlass::FastDivmod(s.strips);
  p.slices = cutlass::FastDivmod(c.d);
  p.tasks = cutlass::FastDivmod(s.tasks);
  p.blocks_c = cutlass::FastDivmod(s.blocks_c);
  p.blocks_k = cutlass::FastDivmod(s.blocks_k);
  return p;
}

// Where a task's blocks of channels and its depth tap are.
struct Task {
  int block_c, block_k, depth_tap;

  __device__ __forceinline__ Task(Params const& p, int index) {
    p.blocks_c(index, block_c, index);
    p.blocks_k(depth_tap, block_k, index);
  }
};

// Where a task's split finds its partial sums: a warpgroup's accumulators in fours, each lane's
// beside the next one's. To be read by AddPartials.
__device__ __forceinline__ int64_t partial_index(Params const& p, int task, int split,
                                                 int warpgroup, int filter_rows) {
  int64_t const block = int64_t(task) * p.splits + split;
  return (block * p.warpgroups() + warpgroup) * filter_rows * (kBlock * kBlock);
}

// A block of the grid: those of a split are neighbours, and read the same lines at the same time.
struct BlockWork {
  int task, split;

  __device__ __forceinline__ explicit BlockWork(Params const& p) {
    p.tasks(split, task, int(blockIdx.x));
  }
};

// The rows that fall to a split: whole units, then a share of the rows of those left over. Each
// run of rows is followed by empty lines of the input, one less than the filter has rows, so that
// no product joins rows of two runs.
struct Share {
  int split, rounds, first, last;

  __device__ __forceinline__ Share(Params const& p, int split) : split(split) {
    rounds = p.units / p.splits;
    int64_t const rest = int64_t(p.units % p.splits) * p.h;
    first = int(rest * split / p.splits);
    last = int(rest * (split + 1) / p.splits);
  }

  // Calls run(unit, first row, one behind its last).
  template <class Run>
  __device__ __forceinline__ void for_each_run(Params const& p, Run const& run) const {
    for (int round = 0; round < rounds; ++round) run(split + round * p.splits, 0, p.h);
    for (int row = first; row < last;) {
      int const unit = row / p.h;
      int const end = min(last, (unit + 1) * p.h);
      run(rounds * p.splits + unit, row - unit * p.h, end - unit * p.h);
      row = end;
    }
  }
  // Lines of the input, the empty ones included.
  __device__ __forceinline__ int steps(Params const& p, int empty_lines) const {
    int result = rounds * (p.h + empty_lines);
    for (int row = first; row < last;) {
      int const end = min(last, (row / p.h + 1) * p.h);
      result += end - row + empty_lines;
      row = end;
    }
    return result;
  }
};

// The start of shared memory.
struct Barriers {
  uint64_t full[kMaxStages];
  uint64_t split[kMaxStages];  // in strict fp32: the input's lines are in two parts
  uint64_t empty[kMaxStages];
};
static_assert(sizeof(Barriers) <= kHeaderBytes);

// Addresses in shared memory, where barriers, lines of the input and of the gradient follow each
// other.
struct Memory {
  uint32_t input;
  uint32_t small_input;  // what is left of the input's lines, where they are split
  uint32_t grad;

  template <class Traits>
  __device__ __forceinline__ static Memory of(Params const& p, uint32_t shared) {
    uint32_t const input = shared + kHeaderBytes;
    uint32_t const lines = (p.stages + Traits::kFilterRows - 1) * Traits::kInputBytes;
    uint32_t const small_input = input + (Traits::kSplits ? lines : 0);
    return {input, small_input, small_input + lines};
  }
};

}  // namespace fusedconv::conv::sm90::wgrad
