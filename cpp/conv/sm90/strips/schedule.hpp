// How a convolution of stride 1 with 3 x 3 taps, channels first and of 16 bits, is cut into strips.
// Host code without CUDA.
//
// A block goes down a strip of the image, line after line, and from a sample to the next. The
// filter is the instruction's first operand, 64 output channels by 16 input channels for each tap,
// and stays in registers; a line of the input, channels by positions as they lie, is the second.
// That begins at whole 16 bytes in memory and in shared memory, so of each line there are as many
// copies as a filter's row has taps, each a position further than the one before it: tensor copies
// bring the line once, and warps of their own make the others of it.
//
// Two groups of warps that multiply take every other line, so that one's products are under way
// while the other stores.
#pragma once

#include <cstdint>

#include "conv/math_table.hpp"
#include "conv/problem.hpp"
#include "fusedconv/device.hpp"
#include "fusedconv/support.hpp"
#include "fusedconv/types.hpp"

namespace fusedconv::conv::sm90::strips {

inline constexpr int kTaps = 3;        // of a filter's rows and columns
inline constexpr int kPositions = 64;  // of a strip's line: 128 bytes of a channel, swizzled
inline constexpr int kChannels = 64;   // output channels of a block, and most input channels
inline constexpr int kStepChannels = 16;
inline constexpr int kSteps = kChannels / kStepChannels;
inline constexpr int kProducts = kTaps * kTaps * kSteps;  // of a line
inline constexpr int kConsumers = 2;
inline constexpr int kStages = 8;   // lines of the ring
inline constexpr int kGranule = 8;  // positions of 16 bytes
inline constexpr int kVectorBytes = 16;
inline constexpr int kPitch = kPositions * 2;
inline constexpr int kCopyBytes = kChannels * kPitch;
inline constexpr int kLineBytes = kTaps * kCopyBytes;
inline constexpr int kStagedBytes = kCopyBytes;  // of a consumer's output
inline constexpr int kBarrierBytes = 256;
inline constexpr int kMostLines = 1 << 30;  // of an output, all samples'

// What a compiled kernel fixes: columns of the input before an output's that the filter reads.
struct Reach {
  int before;  // 0 to 2

  // Positions that a line begins before its strip: copies begin at whole 16 bytes.
  constexpr int lead() const { return before > 0 ? kGranule : 0; }
  // Vectors behind a strip's line that copies are made of, too.
  constexpr int tails() const { return (lead() - before + kTaps - 2) / kGranule + 1; }
  constexpr int tail_bytes() const { return kChannels * tails() * kVectorBytes; }
  // Shares of shared memory, in this order: lines, tails, what is stored, barriers.
  static constexpr int tails_at() { return kStages * kLineBytes; }
  constexpr int staged_at() const { return tails_at() + kStages * tail_bytes(); }
  constexpr int barriers_at() const { return staged_at() + kConsumers * kStagedBytes; }
  constexpr int shared_bytes() const { return barriers_at() + kBarrierBytes; }
};

struct Schedule {
  Support support;
  int strips = 0;
  int blocks_n = 0;          // of output channels
  int sets = 0;              // of blocks, one for each strip and block of output channels
  int64_t filter_bytes = 0;  // packed
  int shared_bytes = 0;
};

// aligned: the input's address is a multiple of 16 bytes; padded_lines: so is the distance from one
// of its lines to the next, whatever their width.
Schedule schedule_of(ConvProblem const& problem, Reach const& reach, Math math, Layout layout,
                     bool aligned, bool padded_lines, Device const& device);

}  // namespace fusedconv::conv::sm90::strips
