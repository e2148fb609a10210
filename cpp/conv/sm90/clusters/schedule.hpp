// How a small transposed convolution is cut into clusters of blocks. Host code without CUDA.
//
// A cluster computes some output channels of one sample, all of a group that is normalised, so that
// convolution, statistics and normalisation are one launch. Its blocks divide the output positions
// (slabs, along the first axis that has several) and the input channels (shares): each stages its
// part of input and weight as they lie, multiplies them by warps, and leaves its sums in shared
// memory, where the blocks of a slab add each other's up, a part of the outputs each. A small
// problem reads its weight so seldom that packing it first would cost more than it gains.
#pragma once

#include <array>
#include <cstdint>

#include "conv/math_table.hpp"
#include "conv/transposed.hpp"
#include "fusedconv/device.hpp"
#include "fusedconv/support.hpp"
#include "fusedconv/types.hpp"

namespace fusedconv::conv::sm90::clusters {

inline constexpr int kThreads = 512;
inline constexpr int kWarps = kThreads / 32;
inline constexpr int kMostBlocks = 8;    // of a cluster that every device of 9.0 can hold
inline constexpr int kMostResident = 2;  // blocks of a multiprocessor
// Of a tile of products: output positions of one phase, output channels, bytes of input channels.
inline constexpr int kTileRows = 16;
inline constexpr int kTileColumns = 8;
inline constexpr int kStepBytes = 32;
inline constexpr int kMostTiles = 4;  // of a warp beside each other
inline constexpr int kMostColumns = 256;
inline constexpr int kMostPhases = 64;  // of all axes

using Problem = TransposedProblem;

// Of a block's shared memory, in bytes from its start, which has the filter's rows.
struct Memory {
  int pitch = 0;       // of rows of channels
  int input = 0;       // rows of pixels
  int next_input = 0;  // from those to the next chunk's, where copies bring them
  int raw = 0;         // lines of the weight, then of the input, as copies bring them
  int raw_weight_pitch = 0, raw_input_pitch = 0;
  int sums = 0, columns = 0;
  int spare = 0;  // 16 bytes that anything may be written to
  int end = 0;
  static constexpr int kColumnBytes = 12;

  // From a row to the next: an odd number of 16 bytes, so that eight rows meet all banks.
  static constexpr int odd_pitch(int64_t bytes) { return int((bytes + 15) / 16 | 1) * 16; }
};

struct Schedule {
  Support support;
  std::array<Axis, kMaxAxes> axes;
  int outer = 0;  // the axis along which slabs lie
  int columns = 0;
  int column_blocks = 0;   // clusters of a sample
  int padded_columns = 0;  // whole tiles
  int tiles = 0;           // of a warp beside each other
  int slabs = 1, shares = 1;
  int slab = 0;            // positions along the outer axis
  int share_channels = 0;  // whole steps; the last share may have fewer
  int chunk = 0;           // channels that are staged at once
  int chunks = 1;
  int box = 0;           // input pixels of a slab, at most
  int slab_outputs = 0;  // pixels, at most
  Memory memory;
  int shared_bytes = 0;
  int resident = 1;           // clusters that a device holds at once, roughly
  double block_cycles = 0.0;  // estimated, of those together

  int blocks() const { return slabs * shares; }  // of a cluster
  // From a tap's rows of the filter to the next one's: odd, as neighbouring taps are turned at
  // once.
  int tap_rows() const { return padded_columns + 1; }
};

// group_channels: output channels that are normalised together; 0 where none are.
Schedule schedule_of(Problem const& problem, int group_channels, Math math, Device const& device);

}  // namespace fusedconv::conv::sm90::clusters
