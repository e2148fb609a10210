// A consumer's accumulators, and which channels and phases they are of.
//
// Of a warp's rows a lane has lane / 4 and that plus 8, and of every 8 columns two from lane % 4 *
// 2, as the instruction counts them: sum 4 j + 2 (row / 8) + column % 2 of an instruction is of its
// columns 8 j and on.
#pragma once

#include "conv/sm90/boxes/params.hpp"
#include "conv/sm90/boxes/traits.hpp"
#include "cuda/async.hpp"

namespace fusedconv::conv::sm90::boxes {

template <class Traits>
using Sums = float[Traits::kInstructions][Traits::kSums];

// By the numbers that they would have in one instruction.
template <class Traits>
__device__ __forceinline__ constexpr float& sum_at(Sums<Traits>& sums, int index) {
  return sums[index / Traits::kSums][index % Traits::kSums];
}

// By a segment and the number there.
template <class Traits>
__device__ __forceinline__ constexpr float& sum_of(Sums<Traits>& sums, int segment, int index) {
  return sum_at<Traits>(sums, segment * (Traits::kSegmentColumns / 2) + index);
}

template <class Traits, class Body>
__device__ __forceinline__ void for_each_sum(Sums<Traits>& sums, Body const& body) {
#pragma unroll
  for (auto& instruction : sums) {
#pragma unroll
    for (float& sum : instruction) body(sum);
  }
}

// A consumer among the block's threads.
struct Consumer {
  int index, thread, warp, lane;

  __device__ __forceinline__ void sync() const {
    device::sync_threads(1 + index, kWarpgroupThreads);
  }
};

// Which channel and phase a column of a block is; none where `phase` is that of no set.
struct ColumnPlace {
  bool present;
  int phase, channel;

  __device__ __forceinline__ ColumnPlace(Params const& p, Block const& block, int column) {
    int segment, within;
    p.segments(segment, within, column);
    channel = block.channel + within;
    phase = p.first_phase[block.set] + segment;
    present = segment < p.set_phases[block.set] && channel < p.output_channels;
  }
};

// What an epilogue does beside adding the bias, an affine map, activating and storing: a kernel of
// its own each, as the others' would be the slower for it.
enum class Extra { kNone, kNormalizesPixels, kTakesMoments };

// Until what the consumer has staged may be overwritten, by all its threads.
__device__ __forceinline__ void finish_copies(Consumer const& self) {
  if (self.thread == 0) device::wait_stores_read();
  self.sync();
}

// Which of a convolution's results an epilogue computes: what is saved for the backward pass, the
// biased sum; the output, from sums or from what is saved of them.
enum class Result { kSaved, kOutput };

}  // namespace fusedconv::conv::sm90::boxes
