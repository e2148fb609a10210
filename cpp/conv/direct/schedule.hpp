// How a transposed convolution of few channels a group is cut into blocks. Host code without CUDA.
//
// Each output gathers the taps of its sub-pixel phase (conv/axis.hpp) by multiply-adds in float32:
// with so few products an output memory is the limit, and tensor cores would mostly multiply
// padding. A tile is a rectangle of quotients of the stride along depth and height, with all their
// phases, and of outputs along width.
//
// (Channels last: of quotients along width too.) Channels first, a team of threads has one tile of
// a convolution group: it stages what the tile reads in shared memory, in float32 and with zeros
// around, and computes the group's output channels from it a few at a time: a thread has some rows
// of each, runs of neighbouring outputs. Channels last, the threads of a block lie along channels
// and go through the tile's outputs; inputs come from global memory.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "conv/direct/taps.hpp"
#include "conv/math_table.hpp"
#include "conv/transposed.hpp"
#include "fusedconv/device.hpp"
#include "fusedconv/support.hpp"
#include "fusedconv/types.hpp"

namespace fusedconv::conv::direct {

inline constexpr int kThreads = 256;
inline constexpr int kWarp = 32;
inline constexpr int kPixels = 4;      // of a thread at once, channels last
inline constexpr int kLineBytes = 16;  // of a tile's table
// Groups are of so many products of an input and an output channel, or of so few input channels.
inline constexpr int kMostProducts = 64;
inline constexpr int kFewChannels = 16;
inline constexpr int kMostStride = 1 << 15;  // products of two fit an int
inline constexpr int kFirstPhases = 8;       // along an axis, that the host computes
inline constexpr int kGeneral = -1;          // no compiled taps
inline constexpr int kDoubledInputs = 4;     // that a width is a multiple of, see doubled.hpp

// Channels first, a thread computes at once rows of outputs of one output channel or of several:
// as many as registers hold next to two quads of the filter for each, or four if one is enough.
inline constexpr int kMostChannels = 4;
inline constexpr int kMostRows = 4;
inline constexpr int kThreadOutputs = 64;
constexpr int channels_of(int element_bytes, int kernel) {
  return kernel > 4 ? 2 : 8 / element_bytes;
}
constexpr int rows_of(int run, int channels) {
  return std::min(kMostRows, kThreadOutputs / (run * channels));
}
// Blocks that a multiprocessor has at once.
constexpr int blocks_of(int channels) { return channels > 1 ? 2 : 3; }
// Of the warps of a block, in shared memory, for two such groups of channels.
inline constexpr int kMomentsBytes = 2 * kMostChannels * (kThreads / kWarp) * 16;

using Problem = TransposedProblem;

struct Schedule {
  Support support;
  std::array<Axis, kMaxAxes> axes;
  // Quotients; channels first, along width outputs.
  std::array<int, kMaxAxes> tile{};
  std::array<int, kMaxAxes> tiles{};
  std::array<int, kMaxAxes> extent{};  // outputs of a tile, from its first to its last
  std::array<int, kMaxAxes> lines{};   // of the table of taps, channels last
  int teams = 0;                       // of a block; channels last 1
  int channel_blocks = 0;              // of a group's output channels; channels last, of all
  int block_channels = 0;
  int weight_floats = 0;  // of a team; channels first, before its bias
  int shared_bytes = 0;
  // Channels first:
  int run_taps = kGeneral;   // index into kRunTaps
  int run = 1;               // neighbouring outputs of a thread
  int unit_channels = 1;     // output channels of a thread at once
  int rows = 1;              // of each
  int strip = 0;             // in runs, where a thread's rows lie that far apart along width; or 0
  int row_groups = 0;        // threads for the lines of a phase along height
  bool stores_runs = false;  // whole, else outputs go by shared memory
  bool doubles = false;      // planes, by doubled.hpp where no moments are taken
  std::array<int, kMaxAxes> box{};     // staged positions; along width a multiple of 4
  std::array<int, kMaxAxes> before{};  // from a tile's first quotient to the box's first position
  bool joined = false;                 // a tile's lines follow each other in the output
  int segment = 0;                     // outputs of a tile that are contiguous
  // From a channel, a plane or a line of outputs in shared memory to the next: up to whole 16 bytes
  // as far as in memory.
  std::array<int, kMaxAxes> staged{};
  // Channels last:
  int vector = 1;  // channels of a thread

  int team_threads() const { return kThreads / teams; }
  int bias_floats() const { return int(round_up(block_channels, 4)); }
  int segments() const { return joined ? extent[0] : extent[0] * extent[1]; }
  int box_floats() const { return box[0] * box[1] * box[2]; }
  int table_bytes() const { return (lines[0] + lines[1] + lines[2]) * kLineBytes; }
  int64_t sample_tiles() const { return int64_t(tiles[0]) * tiles[1] * tiles[2]; }
};

Schedule schedule_of(Problem const& problem, Math math, Device const& device);

}  // namespace fusedconv::conv::direct
