// How a convolution is cut into tiles whose operands tensor copies bring. Host code without CUDA.
//
// A transposed convolution scatters: its output has the sub-pixel phases. The gradient of its input
// is an ordinary convolution, which gathers: position q sums weight[t] input[stride q + dilation t
// - padding], so that each tap reads pixels of one phase of the input, a source.
//
// In the instruction's terms M counts positions, N columns (output channels of sub-pixel phases)
// and K input channels; or, where columns are few, M columns and N positions, whose products then
// read less of shared memory. For each tap of the filter and chunk of channels one box of the
// input, shifted by the tap, is copied to shared memory as the instruction wants it, with zeros for
// what lies outside; a block of the filter follows. A consumer warpgroup has kSlab positions, a box
// of its own; the two of a block share the filter, or where a tile is one box take turns, so that
// one multiplies while others finish their tiles. Where the filter of a block of columns is small
// it stays in shared memory, and boxes are all that is copied for a tile. Columns of a block are
// `segments` of output channels, of one phase each. A row with one segment is free to divide its
// columns: they are output channels of one phase, or some or all of several phases that read the
// same positions. One with several has as many neighbouring phases, each multiplied by the taps
// that it has, or some at once that have the same; where they are the phases along width, their
// pixels leave side by side, channels first.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "conv/math_table.hpp"
#include "conv/transposed.hpp"
#include "fusedconv/device.hpp"
#include "fusedconv/support.hpp"
#include "fusedconv/types.hpp"

namespace fusedconv::conv::sm90::boxes {

inline constexpr int kConsumers = 2;        // warpgroups that multiply, of most rows
inline constexpr int kSlab = 64;            // positions of a consumer
inline constexpr int kChunkBytes = 128;     // of channels, in a stage
inline constexpr int kSwizzleBytes = 1024;  // what boxes begin at multiples of
inline constexpr int kStepBytes = 32;       // of channels, in an instruction
inline constexpr int kPieceBytes = 16;      // of a packed filter's line, by one thread
inline constexpr int kMostStages = 8;
inline constexpr int kMostPhases = 16;
inline constexpr int kMostTaps = 160;               // of all sets
inline constexpr int kMostFilterTaps = 384;         // of the filter
inline constexpr int64_t kMostPieces = 0x7fffffff;  // of the packed filter, counted in 32 bits
inline constexpr int kFewestSegment = 64;           // of columns, where channels are divided
inline constexpr int kGranule = 8;          // of columns: an instruction's, and 16 bytes of 16 bits
inline constexpr int kMostBoxExtent = 256;  // along an axis of a tensor copy
inline constexpr int kFewestLine = 8;       // positions of a slab's line, channels first
inline constexpr int kMostPixels = 8;       // of a position in a block that normalises them
inline constexpr int kMostLine = 64;        // columns of a filter's line

using Problem = TransposedProblem;
using Tap = std::array<int16_t, kMaxAxes>;
using Residues = std::array<int, kMaxAxes>;

// `input` of a problem's axes is what is read and `output` what is written, either way.
enum class Direction { kScatters, kGathers };

// Whether a filter is lines of output channels, one for each channel of a chunk, as they are beside
// each other in a weight that is channels last; else rows of channels, as the instruction wants 32
// bits and as what gathers finds them in such a weight.
constexpr bool has_filter_lines(Direction direction, int element_bytes) {
  return direction == Direction::kScatters && element_bytes == 2;
}

// What a compiled kernel fixes of a tile.
struct Shape {
  int columns = 0;      // of a block
  int segments = 1;     // of these
  bool planes = false;  // reads channels first, else last
  int residents = 1;    // blocks of a multiprocessor: one's products while another stores
  int alike = 1;        // neighbouring segments whose phases have the same taps, multiplied at once
  bool ping_pong = false;      // consumers take tiles in turns, else each a slab of all
  int consumers = kConsumers;  // warpgroups that multiply
  // A multiprocessor has one block of columns, whose filter stays in shared memory: the ring brings
  // positions alone.
  bool stationary = false;
  // A box has what all taps of a chunk and a plane read, and each multiplies positions shifted in
  // it; else a box is copied for each tap.
  bool halo = false;
  // Positions of a slab. Where they are more than kSlab the filter is the instruction's first
  // operand and they the second, of which it takes so many at once.
  int positions = kSlab;
  int staged = 0;  // portions of columns that a consumer stages at most, or 0: as the rest says

  constexpr int segment_columns() const { return columns / segments; }
  // Channels first, the columns that are staged at a time: eight channels of all segments at least.
  constexpr int plane_columns(int portion) const { return std::max(portion, 8 * segments); }
  // Of a copy's line then: as wide as swizzled ones are, or where a position has as many phases as
  // a store's banks, as copies may be.
  constexpr int plane_positions(int element_bytes) const {
    return segments < 8 ? kChunkBytes / element_bytes / segments : kMostBoxExtent / segments;
  }
  constexpr bool filter_first() const { return positions > kSlab; }
  // Of a tile.
  constexpr int slabs() const { return ping_pong ? 1 : consumers; }
  // Of the ring: a chunk of channels for a tile's slabs, unless these have a ring of their own, and
  // for the filter's columns.
  constexpr int stage_bytes() const {
    return ((halo ? 0 : slabs() * kSlab) + (stationary ? 0 : columns)) * kChunkBytes;
  }
  // Warps that copy, of which each fills every second stage or so.
  constexpr int producers() const { return stationary ? 2 : 1; }
  // Values of columns that have a place beside what is staged: those of all tiles, or those of each
  // consumer, which reads them while it stages.
  constexpr int column_values() const { return stationary ? 1 : ping_pong ? consumers : 0; }
  // Of a consumer.
  constexpr int staged_portions() const { return staged > 0 ? staged : residents == 1 ? 2 : 1; }
};

// A box with a halo: of kHaloLine positions along width and as many lines along another axis, or of
// a line of kSlab, so that the instruction's positions, eight by eight, lie evenly apart in it.
inline constexpr int kHaloLine = 8;
inline constexpr int kHaloStages = 2;

// Lines of a box that products are of, where the filter is their first operand: of those that hold
// the image's the fewest.
inline constexpr std::array kProductLines{4, 8, 16, 24};

// Phases that blocks of columns go over together.
struct PhaseSet {
  int first = 0;  // of Schedule::phases
  int count = 0;
  int first_tap = 0;
  int taps = 0;       // that any of the phases has
  int first_row = 0;  // of the packed filter, in terms of a channel block and chunk
  int rows = 0;       // the same of all taps: columns of the phases that have each
  Tap lowest{};       // by axis of its taps
};

// Boxes of a launch: positions of a slab, and slabs by axis. The last axis is samples.
struct Slabs {
  std::array<int, kMaxAxes + 1> box{1, 1, 1, 1};
  std::array<int, kMaxAxes + 1> count{1, 1, 1, 1};
  std::array<int, kMaxAxes> reach{};  // positions beside those that are copied along an axis

  int64_t all() const { return int64_t(count[0]) * count[1] * count[2] * count[3]; }
  int positions() const { return box[0] * box[1] * box[2] * box[3]; }
  // Of what is copied.
  int extent(int axis) const { return box[axis] + reach[axis]; }
  int copied() const { return extent(0) * extent(1) * extent(2) * box[3]; }
  // Of the copy: from a position to the next along an axis, samples the last.
  int pitch(int axis) const {
    int const pitches[] = {extent(2) * extent(1), extent(2), 1, extent(2) * extent(1) * extent(0)};
    return pitches[axis];
  }
  // From eight of the instruction's rows to the next.
  int eights_pitch() const {
    for (int axis : {kMaxAxes, 0, 1}) {
      if (box[axis] > 1) return pitch(axis);
    }
    return kHaloLine;
  }
};

struct Schedule {
  Support support;
  std::array<Axis, kMaxAxes> axes;  // of what is written, where it is gathered
  Direction direction = Direction::kScatters;
  std::vector<Residues> phases;  // of the output, by set
  std::vector<PhaseSet> sets;    // those with the most taps first
  std::vector<Tap> taps;         // by set: input position less the output's
  std::vector<uint16_t> masks;   // of each tap: bits of the set's phases with it
  // The filter's taps of these phases in turn, where it scatters, and which is the first by tap.
  std::vector<uint16_t> filter_taps, first_filter_taps;
  std::vector<Residues> sources;          // phases of an input that is gathered from
  std::vector<uint8_t> tap_sources;       // by tap, then
  Layout layout = Layout::kChannelsLast;  // of the output
  int segment = 0;                        // columns of a phase in a block
  int line = 0;                           // columns of a filter's line, which divide it; or 0
  int channel_blocks = 0;
  int store_columns = 0;    // of a tensor copy to the output; divides the segment
  int store_positions = 0;  // of a line of it, channels first
  int blocks = 0;           // of columns
  int chunks = 0;           // of channels
  int stages = 0;
  int shared_bytes = 0;
  int kept_bytes = 0;                 // of the filter, in shared memory
  int positions = kSlab;              // of a slab, at most
  std::array<int, kMaxAxes> reach{};  // of Slabs, along height and width, where boxes have halos
  int halo_bytes = 0;                 // of such a box's stage
  int64_t filter_bytes = 0;
  int64_t filter_pieces = 0;  // of kPieceBytes, with those that belong to no phase

  // The fewest of `most` positions at most. A slab may hold positions of several samples. Those of
  // boxes with halos are of what a slab has room for.
  Slabs slabs(int64_t batch, int most = kSlab) const;
  // The same of one sample each, cut alike whatever the batch.
  Slabs sample_slabs(int64_t batch) const;
};

// The problem's layout is the output's.
Schedule schedule_of(Problem const& problem, Direction direction, Math math, Shape const& shape,
                     Device const& device);

// Which phase of the input each tap of a convolution that gathers reads, and how far from the
// output's position: fills sources, taps and tap_sources, in the filter's order. Refuses more
// sources than kMostPhases, and those that no pixel of the input is of.
Support gather_taps(Problem const& problem, Schedule& schedule);

// Of shared memory: a ring of boxes with halos, the ring, a filter that stays, what consumers stage
// of their output, values of its columns, barriers.
struct Memory {
  static constexpr int kBarrierBytes = 256;
  static constexpr int kColumnBytes = 20;  // of a column's values, where they have their own place
  static constexpr int kPortionBytes = kSlab * kChunkBytes;  // of what a consumer stages
  int ring = 0, kept = 0, staged = 0, values = 0, barriers = 0, end = 0;

  static Memory of(Shape const& shape, int stages, int kept_bytes, int halo_bytes) {
    Memory m;
    m.ring = shape.halo ? kHaloStages * shape.slabs() * halo_bytes : 0;
    m.kept = m.ring + stages * shape.stage_bytes();
    m.staged = m.kept + kept_bytes;
    m.values = m.staged + shape.staged_portions() * shape.consumers * kPortionBytes;
    m.barriers = m.values + shape.column_values() * shape.columns * kColumnBytes;
    m.end = m.barriers + kBarrierBytes;
    return m;
  }
};

}  // namespace fusedconv::conv::sm90::boxes
