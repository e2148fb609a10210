// How a transposed convolution along one axis, channels first and of 16 bits, is cut into blocks.
// Host code without CUDA.
//
// Filters of up to two strides give each phase of the output two taps at most, which meet
// neighbouring positions of the input. A block multiplies both taps of some channels' phases, each
// for itself, by the same positions: the filter is the instruction's first operand and stays in
// shared memory, lines of the input as they lie are the second. What a phase's two taps gave at
// neighbouring positions is added behind the products. So the input is neither transposed nor
// shifted, which copies that begin at whole 16 bytes could not do.
//
// Tap t and tap t + stride are those of one phase: outputs stride i - padding + t are the first's
// product at position i, the center, and the second's at position i - 1, the side.
#pragma once

#include <cstdint>

#include "conv/math_table.hpp"
#include "conv/transposed.hpp"
#include "fusedconv/device.hpp"
#include "fusedconv/support.hpp"
#include "fusedconv/types.hpp"

namespace fusedconv::conv::sm90::lines {

inline constexpr int kRows = 64;      // of one instruction: phases of channels
inline constexpr int kColumns = 128;  // positions of one
inline constexpr int kLine = 64;      // of them that a copy brings: 128 bytes
inline constexpr int kChunk = 64;     // channels of a copy
inline constexpr int kLineBytes = 128;
inline constexpr int kTileBytes = kLine * kChunk * 2;  // of one copy
inline constexpr int kTaps = 2;                        // center and side
inline constexpr int kStageBytes = kColumns / kLine * kTileBytes;
inline constexpr int kGranule = 8;  // positions that copies begin at multiples of
// Columns whose neighbours a block has too, from the first of them on.
inline constexpr int kFirstOutput = 4;
inline constexpr int kOutputs = kColumns - kGranule;
inline constexpr int kLeastStages = 4, kMostStages = 6;
inline constexpr int kBarrierBytes = 128;
inline constexpr int kMostStride = 16;

// What a compiled kernel fixes: groups of four warps that multiply.
struct Shape {
  int consumers;
};

struct Schedule {
  Support support;
  Axis axis;
  int together = 0;    // consumers that share a tile of positions, of a block's
  int row_blocks = 0;  // of kRows, of all channels
  int groups = 0;      // of so many row blocks as share a tile: blocks that have the same positions
  int chunks = 0;      // of channels
  int stages = 0;
  // Taps are rows from this one on, those before it last, and outputs of row q at position i are
  // base + stride i + q, of those last ones a stride before: so four of them that are stored at
  // once begin at whole eight bytes where they can.
  int rotation = 0, base = 0;
  int first = 0;             // position of the first tile's first column
  int tiles = 0;             // of a sample
  int channel_pitch = 0;     // of a packed filter's rows
  int64_t filter_bytes = 0;  // packed
  int kept_bytes = 0;        // of the filter in shared memory; the ring is behind it
  int shared_bytes = 0;
  double tile_cycles = 0.0;  // estimated

  int row_channels() const { return kRows / axis.problem.stride; }
};

Schedule schedule_of(TransposedProblem const& problem, Shape const& shape, Math math,
                     Device const& device);

}  // namespace fusedconv::conv::sm90::lines
