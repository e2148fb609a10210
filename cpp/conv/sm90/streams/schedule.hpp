// How a transposed convolution along one axis, channels first and in TF32, is cut into blocks. Host
// code without CUDA.
//
// Filters of up to two strides give each phase of the output two taps at most, which meet
// neighbouring positions of the input. A block multiplies positions by columns, the phases of some
// channels in turn: positions are the instruction's first operand and come from registers, so that
// lines of the input are read as they lie, shifted by one for the second tap; the filter is the
// second operand, which in TF32 has to be rows of channels, and streams through shared memory with
// the lines.
//
// Outputs stride i - padding + phase are the product of tap `phase` at position i and of tap
// `phase` + stride at position i - 1.
#pragma once

#include <cstdint>

#include "conv/math_table.hpp"
#include "conv/transposed.hpp"
#include "fusedconv/device.hpp"
#include "fusedconv/support.hpp"
#include "fusedconv/types.hpp"

namespace fusedconv::conv::sm90::streams {

inline constexpr int kConsumers = 2;  // groups of four warps that multiply
inline constexpr int kRows = 64;      // positions of an instruction
inline constexpr int kTile = kConsumers * kRows;
inline constexpr int kTaps = 2;
inline constexpr int kChunk = 16;        // channels of a stage
inline constexpr int kStep = 8;          // of one instruction
inline constexpr int kVector = 4;        // channels beside each other in a packed filter
inline constexpr int kGranule = 4;       // positions that copies begin at multiples of
inline constexpr int kFront = kGranule;  // positions in front of a tile's, of which one is read
// From a channel to the next one in shared memory: 8 more than a multiple of 32 words, so that four
// channels of eight positions are in all banks.
inline constexpr int kPitch = kTile + 2 * kGranule;
inline constexpr int kLineBytes = kChunk * kPitch * 4;  // of a stage
inline constexpr int kLeastStages = 3, kMostStages = 8;
inline constexpr int kBarrierBytes = 128;
inline constexpr int kColumnBytes = 20;  // of what a column's sums become
inline constexpr int kMostStride = 64;

// What a compiled kernel fixes.
struct Shape {
  int columns;  // of a block

  constexpr int filter_bytes() const { return kTaps * kChunk * columns * 4; }  // of a stage
  constexpr int stage_bytes() const { return filter_bytes() + kLineBytes; }
};

struct Schedule {
  Support support;
  int groups = 0;            // blocks of columns
  int chunks = 0;            // of channels
  int stages = 0;            // of the ring
  int first = 0;             // position of the first tile's first row
  int tiles = 0;             // of a sample
  int64_t filter_bytes = 0;  // packed
  int shared_bytes = 0;
  double tile_cycles = 0.0;  // estimated
};

Schedule schedule_of(TransposedProblem const& problem, Shape const& shape, Math math,
                     Device const& device);

}  // namespace fusedconv::conv::sm90::streams
