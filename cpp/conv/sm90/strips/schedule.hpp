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

inline constexpr int kTaps = 3;       // of a filter's rows and columns
inline constexpr int kChannels = 64;  // output channels of a block, and most input channels
inline constexpr int kStepChannels = 16;
inline constexpr int kSteps = kChannels / kStepChannels;
inline constexpr int kProducts = kTaps * kTaps * kSteps;  // of a line
inline constexpr int kConsumers = 2;
inline constexpr int kGranule = 8;  // positions of 16 bytes
inline constexpr int kVectorBytes = 16;
inline constexpr int kPart = 64;  // positions of a channel that lie together, swizzled: 128 bytes
inline constexpr int kPitch = kPart * 2;
inline constexpr int kPartBytes = kChannels * kPitch;
inline constexpr int kStagedBytes = kPartBytes;  // of a consumer's output
inline constexpr int kMostStages = 8;
inline constexpr int kBarrierBytes = 256;
inline constexpr int kMostLines = 1 << 30;  // of an output, all samples'

// What a compiled kernel fixes.
struct Shape {
  int positions;  // of a strip's line: whole parts
  int before;     // columns of the input before an output's that the filter reads: 0 to 2
  int stages;     // lines of the ring

  // Positions that a line begins before its strip: copies begin at whole 16 bytes.
  constexpr int lead() const { return before > 0 ? kGranule : 0; }
  constexpr int parts() const { return positions / kPart; }
  // Vectors behind the parts that copies are made of, too.
  constexpr int tails() const {
    int const last = positions - 1 + lead() - before + kTaps - 1;
    return (last - positions) / kGranule + 1;
  }
  constexpr int tail_bytes() const { return kChannels * tails() * kVectorBytes; }
  constexpr int copy_bytes() const { return parts() * kPartBytes; }
  constexpr int line_bytes() const { return kTaps * copy_bytes(); }
  // Shares of shared memory, in this order.
  constexpr int tails_at() const { return stages * line_bytes(); }
  constexpr int staged_at() const { return tails_at() + stages * tail_bytes(); }
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
Schedule schedule_of(ConvProblem const& problem, Shape const& shape, Math math, Layout layout,
                     bool aligned, bool padded_lines, Device const& device);

}  // namespace fusedconv::conv::sm90::strips
