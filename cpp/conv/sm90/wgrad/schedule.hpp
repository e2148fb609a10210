// The schedule of the weight gradient of a transposed convolution of stride 1. Host code without
// CUDA.
//
// Sums run over the input's positions. A strip is 128 bytes of the input's columns, or 64 where its
// rows are no longer; a block
// marches down the rows of strips and meets each row of the input, and the rows of the output's
// gradient that its taps reach, once. In the instruction's terms M counts output channels, N input
// channels for each of the filter's rows and K positions. A warpgroup multiplies for one of the
// filter's columns, so that a block finds the whole plane of filter taps of kBlock input and kBlock
// output channels: a task. Where the filter has one column, warpgroups multiply for neighbouring
// groups of kBlock output channels instead, as many as divide them evenly. The positions of a task
// are split among blocks, whose partial sums are added in a fixed order.
#pragma once

#include <cstdint>

#include "conv/math_table.hpp"
#include "conv/problem.hpp"
#include "fusedconv/device.hpp"
#include "fusedconv/support.hpp"
#include "fusedconv/types.hpp"

namespace fusedconv::conv::sm90::wgrad {

inline constexpr int kBlock = 64;  // channels, of input or output
inline constexpr int kHalfStripBytes = 64;
inline constexpr int kLineAlignment = 16;  // bytes: lines begin at multiples of it
inline constexpr int kMaxFilterRows = 3;
inline constexpr int kMaxFilterColumns = 3;
inline constexpr int kMaxWarpgroups = 3;  // of a block: for columns, or groups of output channels
static_assert(kMaxFilterColumns <= kMaxWarpgroups);
inline constexpr int kMaxStages = 16;
// Steps after which accumulators are added to the block's partial sums: the tensor core drops bits
// in every addition to an accumulator, which a long sum would show: 1.8e-8 of the sum in each. A
// step is up to four additions, two where a strip is one half; after 128 steps sums are 9e-6 of
// themselves too small.
inline constexpr int kFlushSteps = 128;
// In strict fp32 half a strip's products are a sum of their own, which is added to a total in
// registers, with rounding: what that leaves grows with the root of the number of additions.
inline constexpr int kSplitFlushSteps = 32;
inline constexpr int kHeaderBytes = 1024;  // barriers

// Elements from one line to the next in tensors whose lines are padded to kLineAlignment.
constexpr int64_t padded(int64_t columns, int element_bytes) {
  return round_up(columns, kLineAlignment / element_bytes);
}

struct Schedule {
  Support support;
  int parts = 1;   // of the input's values: strict fp32 splits them in two
  int halves = 2;  // of a strip, kHalfStripBytes of a row of the input each
  int strips = 0;  // of a row
  // The box of the output's gradient: columns that it begins before the strip, and its pitch.
  int lead = 0;
  int pitch_bytes = 0;
  int stages = 0;
  int shared_bytes = 0;
  int groups = 1;                  // of kBlock output channels, in a task
  int blocks_c = 0, blocks_k = 0;  // of kBlock input channels, and of all groups' output channels
  int tasks = 0;                   // for each depth tap, those of all channels
  int splits = 0;                  // blocks of a task
  int64_t steps = 0;               // rows of strips that all blocks of a task take
  int64_t partial_bytes = 0;       // of all tasks

  int strip_bytes() const { return halves * kHalfStripBytes; }
  // Of a stage.
  int input_bytes() const { return parts * kBlock * strip_bytes(); }
  int grad_bytes() const { return groups * kBlock * pitch_bytes; }
};

// problem: the convolution that the forward pass lowers to, with its batch; aligned: the tensors'
// addresses are multiples of 16 bytes.
Schedule schedule_of(ConvProblem const& problem, Math math, int filter_rows, Layout layout,
                     Device const& device);

}  // namespace fusedconv::conv::sm90::wgrad
