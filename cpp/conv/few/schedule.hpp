// How a transposed convolution of one to four input channels is cut into blocks. Host code without
// CUDA.
//
// Filters of three taps with stride two and odd padding, along height and width and along depth if
// there is one: output 2 q reads input q + a by tap 1, output 2 q + 1 reads input q + a + 1 by tap
// 0 and q + a by tap 2, where a = (padding - 1) / 2. So the outputs of sixteen quotients q along
// width are products of rows with eight values, four channels of two neighbouring inputs each, on
// tensor cores: one for each line of the input that a line of outputs meets. The even outputs'
// products have zeros for the second input. With so few channels little else than what follows the
// products takes time.
//
// A block has some lines of outputs of every channel in a block of channels, whole ones, and goes
// through planes along depth.
#pragma once

#include <array>
#include <cstdint>

#include "conv/axis.hpp"
#include "conv/doubled_axis.hpp"
#include "conv/math_table.hpp"
#include "conv/transposed.hpp"
#include "fusedconv/device.hpp"
#include "fusedconv/support.hpp"

namespace fusedconv::conv::few {

inline constexpr int kThreads = 256;
inline constexpr int kWarp = 32;
inline constexpr int kWarps = kThreads / kWarp;
inline constexpr int kMostInputs = 4;           // channels, padded with zeros to as many
inline constexpr int kBlockChannels = 16;       // of a block, padded likewise
inline constexpr int kGroups = 2;               // of quotients, eight of a product each
inline constexpr int kQuotients = 8 * kGroups;  // along width, that a warp computes at once
inline constexpr int kStride = kDoublingStride;
inline constexpr int kTaps = kDoublingTaps;
// Planes of the input in shared memory, where there are several: the two that outputs meet, and one
// that is stored while others may still read the one in front of them.
inline constexpr int kPlaneSlots = 3;
// Of a channel of outputs in shared memory: what is copied at least, and what memory's lines have.
inline constexpr int kVectorBytes = 16;
inline constexpr int kLineBytes = 128;
// Blocks of a multiprocessor as far as shared memory goes, where lines are not too long for as
// many.
constexpr int blocks_of(Math math) { return math == Math::kTf32 ? 2 : 4; }
// And as far as registers go: more would keep some of theirs in local memory.
constexpr int blocks_of(Math math, bool moments) {
  return math == Math::kTf32 ? (moments ? 3 : 2) : (moments ? 4 : 3);
}
// A lane's channels of a block, neighbours, and its outputs of each along width, which follow one
// another.
inline constexpr int kSlots = 2;
inline constexpr int kRun = kQuotients * kStride / 4;
// Of a block's channels: 9 products' operands, for even and odd outputs and halves of the channels,
// of two elements a lane each.
inline constexpr int kOperands = 9 * 2 * 2;
inline constexpr int kMomentsBytes = kWarps * kBlockChannels * 16;

using Problem = TransposedProblem;

struct Schedule {
  Support support;
  int shift[kMaxAxes] = {};  // from a quotient to the input that even outputs read
  int quotients[kMaxAxes] = {};
  int lines = 0;      // quotients along height of a block
  int planes = 0;     // outputs along depth that a block goes through
  int tiles[2] = {};  // of a sample along depth and height
  int channel_blocks = 0;
  int width_tiles = 0;  // of kQuotients
  // In shared memory: inputs of a line, lines of a plane, and elements from a channel of staged
  // outputs to its next and from a plane's to another's.
  int box_columns = 0, box_lines = 0, staged_channel = 0, staged_elements = 0;
  int buffers = 0;       // for staged planes: two, or one where lines are too long
  bool vectors = false;  // all runs of outputs begin at whole ones, as far as the tensor does
  int box_bytes = 0, operand_bytes = 0, staged_bytes = 0, shared_bytes = 0;

  int64_t sample_tiles() const { return int64_t(tiles[0]) * tiles[1]; }
};

Schedule schedule_of(Problem const& problem, Math math, Device const& device);

}  // namespace fusedconv::conv::few
