// How a transposed convolution of any stride, filter and layout is cut into blocks. Host code
// without CUDA.
//
// The output's sub-pixel phases share one grid of positions: output = stride * position + residue.
// In the instruction's terms M counts rows, N positions and K input channels. A row group is up to
// kGroupRows output channels of one phase, and a row takes `groups` of them in a block, so that a
// phase's neighbours along width are computed, and stored, together. A tile is a rectangle of
// positions. What its phases' taps read of kChunkBytes of channels is a box of the input, which is
// staged in shared memory with channels innermost, so that a tap is an offset there, whatever its
// alignment. Where the box would be too large, axes are split: a stage then holds what one tap of
// these axes reads.
#pragma once

#include <array>
#include <cstdint>

#include "conv/math_table.hpp"
#include "conv/transposed.hpp"
#include "fusedconv/device.hpp"
#include "fusedconv/support.hpp"
#include "fusedconv/types.hpp"

namespace fusedconv::conv::taps {

inline constexpr int kThreads = 256;
inline constexpr int kWarps = kThreads / 32;
inline constexpr int kGroupRows = 32;      // of a warp
inline constexpr int kWarpPositions = 64;  // of a warp
inline constexpr int kChunkBytes = 64;     // of channels, in a stage
inline constexpr int kPitchBytes = 80;     // from a staged position or filter row to the next
inline constexpr int kFilterSlots = 4;     // steps whose part of the filter is on its way
inline constexpr int kMostBoxPositions = 512;
inline constexpr int kMomentBytes = kThreads * 16;  // of the epilogue, in shared memory

// How the input is read. Vectors are 16 bytes.
enum class Loads : int {
  kPlanes,    // channels first, vectors of neighbouring columns
  kChannels,  // channels last, vectors of neighbouring channels
  kElements,  // either, one by one
};
template <class E>
constexpr char const* describe(E);
template <>
constexpr char const* describe(Loads loads) {
  switch (loads) {
    case Loads::kPlanes: return "nchw";
    case Loads::kChannels: return "nhwc";
    case Loads::kElements: return "element by element";
  }
  return "unknown";
}

using Problem = TransposedProblem;

struct Schedule {
  Support support;
  std::array<Axis, kMaxAxes> axes;
  Loads loads = Loads::kElements;
  int channel_blocks = 0;              // of kGroupRows output channels
  int row_groups = 0;                  // of a convolution group
  int blocks_m = 0;                    // of a convolution group
  int width_phases = 0;                // that a block has of each channel, neighbours in the output
  std::array<int, kMaxAxes> tile{};    // positions
  std::array<int, kMaxAxes> tiles{};   // of the grid of positions
  std::array<bool, kMaxAxes> split{};  // a stage holds what one tap along the axis reads
  std::array<int, kMaxAxes> box{};     // positions
  int lead = 0;                        // columns of the box before the first that is needed
  int chunks = 0;                      // of channels
  int stages = 0;                      // of a chunk
  int steps = 0;                       // of a stage: taps of a row group
  int64_t filter_bytes = 0;            // packed
  int shared_bytes = 0;

  int64_t sample_tiles() const { return int64_t(tiles[0]) * tiles[1] * tiles[2]; }
  int tile_positions() const { return tile[0] * tile[1] * tile[2]; }
  // Of shared memory, for the taps of a block.
  int list_bytes(int groups) const {
    return int(round_up(int64_t(stages) * steps * (groups + 1) * int(sizeof(int)), 128));
  }
  int box_positions() const { return box[0] * box[1] * box[2]; }
};

// groups: row groups of a block.
Schedule schedule_of(Problem const& problem, Math math, int groups, Device const& device);

constexpr int block_positions(int groups) { return kWarps / groups * kWarpPositions; }
// Of the packed filter, for a step of a block.
constexpr int step_bytes(int groups) { return groups * kGroupRows * kChunkBytes; }

// Where the epilogue keeps a block's values, in elements: channels last, from a pixel to the next;
// channels first, from a channel to the next.
constexpr int staged_pixel_pitch(int element_bytes) { return kGroupRows + 16 / element_bytes; }
constexpr int staged_channel_pitch(int groups, int width_phases, int element_bytes) {
  return block_positions(groups) * width_phases + 16 / element_bytes;
}

}  // namespace fusedconv::conv::taps
