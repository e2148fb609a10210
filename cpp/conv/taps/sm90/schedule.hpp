// How a transposed convolution is cut into tiles for warpgroup products. Host code without CUDA.
//
// In the instruction's terms M counts rows (output channels of sub-pixel phases), N columns
// (positions) and K input channels. Both operands lie in shared memory as [16-byte piece of
// channels][row or position][16 bytes]: core matrices without swizzle, so that a tap of the filter
// is a start address among staged positions, whatever its alignment.
//
// A row group is kInstructionRows rows: some output channels, each with group_phases neighbouring
// phases along width. A consumer warpgroup accumulates Row::row_groups of them over Row::columns
// positions. The two consumers of a block have other row groups and the same positions, or
// (shares_rows) the same row groups and other positions. What they multiply is a list of taps for
// each row group, in the order in which the filter's blocks are packed and pass through a ring.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "conv/math_table.hpp"
#include "conv/taps/schedule.hpp"
#include "fusedconv/device.hpp"
#include "fusedconv/support.hpp"
#include "fusedconv/types.hpp"

namespace fusedconv::conv::taps::sm90 {

inline constexpr int kInstructionRows = 64;
inline constexpr int kMmaColumns = 128;  // of an instruction, at most
inline constexpr int kConsumers = 2;     // warpgroups
inline constexpr int kLoadWarps = 7;     // that stage the input
inline constexpr int kWarpRows = 16;     // of an instruction, that a warp has
inline constexpr int kStepBytes = 32;    // of channels, in an instruction
inline constexpr int kMostPieces = 8;    // of 16 bytes of channels, in a stage
inline constexpr int kMostStages = 6;
inline constexpr int kMostSlots = 32;   // of the filter's ring
inline constexpr int kMostPhases = 8;   // along width, in a row group
inline constexpr int kMostJoined = 16;  // phases that a warp has of a channel
inline constexpr int kMostLists = 256;
inline constexpr int kMostTaps = 1536;  // of all lists
inline constexpr int kMaxPhaseStride = 64;
inline constexpr int kMostSplits = 8;     // blocks of a cluster, on every device
inline constexpr int kFewestShare = 4;    // filter blocks of a split block, which else only waits
inline constexpr int kChunkColumns = 32;  // that the epilogue stages at a time

// Which pixels are neighbours in a tile.
enum class Order : int {
  kLine,    // all pixels of the batch, one after the other: no tap reads beside its position
  kBoxes,   // the staged box's, with what lies between its lines
  kEights,  // lines of 8
  kStrips   // lines of 8, in strips beside each other: one an instruction
};

constexpr char const* describe(Order order) {
  switch (order) {
    case Order::kLine: return "line";
    case Order::kBoxes: return "boxes";
    case Order::kEights: return "eights";
    case Order::kStrips: return "strips";
  }
  return "unknown";
}

// What a compiled kernel fixes of a consumer's tile.
struct Shape {
  int row_groups = 1;
  int columns = 256;
  // Of an instruction.
  constexpr int mma_columns() const { return columns < kMmaColumns ? columns : kMmaColumns; }
  // Whether the blocks of a cluster may share a tile's channels: in the smallest tiles, which suit
  // small problems. In others the sums' registers are too many for the code beside them.
  constexpr bool splits_channels() const { return row_groups * columns <= 64; }
};

// A tap of a row group: the input position less the output's, by axis.
using Tap = std::array<int16_t, kMaxAxes>;

struct Schedule {
  Support support;
  std::array<Axis, kMaxAxes> axes;
  Loads loads = Loads::kElements;
  Order order = Order::kBoxes;
  bool shares_rows = false;
  int group_phases = 1;       // along width, in a row group
  bool joins_groups = false;  // a consumer's row groups are further phases of the same channels
  int group_channels = 0;     // output channels of a row group
  int channel_blocks = 0;
  int phase_sets = 0;   // along width: phases over those that a consumer has of a channel
  int units = 0;        // of rows: channel block, phase set, phases along height and depth
  int block_units = 0;  // of a block
  int blocks_m = 0;
  std::array<int, kMaxAxes> tile{};   // positions
  std::array<int, kMaxAxes> tiles{};  // of a sample
  std::array<int, kMaxAxes> box{};
  int lead = 0;       // columns of the box before the first that is needed
  int positions = 0;  // of a stage, odd
  int pieces = 0;     // of 16 bytes of channels, in a stage: 2, 4 or 8
  int chunks = 0;     // of channels
  int stages = 0;
  int slots = 0;                    // of the filter's ring, a power of two
  std::vector<uint16_t> first_tap;  // of each list, and behind the last
  std::vector<Tap> taps;
  int block_taps = 0;      // most filter blocks of a chunk and a block of rows
  double mean_taps = 0.0;  // row groups times taps of a block of rows, in both consumers
  int64_t filter_bytes = 0;
  int shared_bytes = 0;

  int64_t sample_tiles() const { return int64_t(tiles[0]) * tiles[1] * tiles[2]; }
  int joined() const { return group_phases * joined_groups; }
  int joined_groups = 1;
  int tile_columns(Shape const& shape) const {
    return shape.columns * (shares_rows ? kConsumers : 1);
  }
};

Schedule schedule_of(Problem const& problem, Math math, Shape const& shape, Device const& device);

// Where parts of shared memory lie: barriers, offsets of staged positions (two sets), where each
// column of a consumer goes, a warp's staged values, boxes, the filter's ring.
struct Memory {
  static constexpr int kBarrierBytes = 1024;
  int inputs = 0, columns = 0, values = 0, boxes = 0, filter = 0, end = 0;
  int box_bytes = 0, slot_bytes = 0, warp_bytes = 0;

  static Memory of(int positions, int pieces, int stages, int slots, Math math, Shape const& shape);
};

// Elements from a staged row, or channels last from a staged column, to the next: pairs of columns
// by quads of lanes fall into different banks.
constexpr int kRowPitch = kChunkColumns + 8;
constexpr int column_pitch(int element_bytes) { return kWarpRows + 16 / element_bytes; }
// A row group's staged elements.
constexpr int group_values(bool channels_last, int element_bytes) {
  return channels_last ? kChunkColumns * column_pitch(element_bytes) : kWarpRows * kRowPitch;
}

}  // namespace fusedconv::conv::taps::sm90
