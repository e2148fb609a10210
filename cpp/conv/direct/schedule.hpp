// How a transposed convolution of few channels a group is cut into blocks. Host code without CUDA.
//
// Each output gathers the taps of its sub-pixel phase (conv/axis.hpp) by multiply-adds in float32:
// with so few products an output memory is the limit, and tensor cores would mostly multiply
// padding. A tile is a rectangle of quotients of the stride along depth and height, with all their
// phases, and of outputs along width.
//
// (Channels last: of quotients along width too.) Channels first, a team of threads has one tile of
// a convolution group: it stages what the tile reads in shared memory, in float32 and with zeros
// around, and computes the group's output channels from it one after the other, a run of
// neighbouring outputs by thread. Channels last, the threads of a block lie along channels and go
// through the tile's outputs; inputs come from global memory.
#pragma once

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
inline constexpr int kRows = 4;        // of a thread at once, channels first
inline constexpr int kLineBytes = 16;  // of a tile's table
// Groups are of so many products of an input and an output channel, or of so few input channels.
inline constexpr int kMostProducts = 64;
inline constexpr int kFewChannels = 16;
inline constexpr int kMostStride = 1 << 15;  // products of two fit an int
inline constexpr int kGeneral = -1;          // no compiled taps

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
  int weight_floats = 0;  // of a team
  int shared_bytes = 0;
  // Channels first:
  int run_taps = kGeneral;   // index into kRunTaps
  int run = 1;               // neighbouring outputs of a thread
  int strip = 0;             // in runs, where a thread's rows lie that far apart along width; or 0
  int row_groups = 0;        // of a thread's lines of a phase along height
  bool stores_runs = false;  // whole, else outputs go by shared memory
  std::array<int, kMaxAxes> box{};     // staged positions; along width a multiple of 4
  std::array<int, kMaxAxes> before{};  // from a tile's first quotient to the box's first position
  int segment = 0;      // of shared memory, in elements, for outputs that are contiguous
  bool joined = false;  // a tile's lines follow each other in the output
  // Channels last:
  int vector = 1;  // channels of a thread

  int team_threads() const { return kThreads / teams; }
  int box_floats() const { return box[0] * box[1] * box[2]; }
  int table_bytes() const { return (lines[0] + lines[1] + lines[2]) * kLineBytes; }
  int64_t sample_tiles() const { return int64_t(tiles[0]) * tiles[1] * tiles[2]; }
};

Schedule schedule_of(Problem const& problem, Math math, Device const& device);

}  // namespace fusedconv::conv::direct
