// The schedule of a transposed convolution of stride 1 whose positions come from registers. Host
// code without CUDA.
//
// A row of the output is cut into quads, runs of four neighbouring columns, and rows into strips of
// some quads each; the last strip may be narrower than the others. In every other row they may
// begin kStagger columns further left. A tile is up to kTileQuads neighbouring quads of a strip,
// row after row. Its input is a box of lines as they lie in the tensor, a halo around them.
//
// In the instruction's terms M counts positions, N output channels and K what is summed: a k-block
// is 32 bytes of input channels, a stage holds a k-block of a tile's lines for one depth tap.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "conv/math_table.hpp"
#include "conv/problem.hpp"
#include "conv/sm90/phase_blocks.hpp"
#include "fusedconv/device.hpp"
#include "fusedconv/support.hpp"
#include "fusedconv/types.hpp"

namespace fusedconv::conv::sm90::runs {

inline constexpr int kBlockN = 64;       // output channels of a block
inline constexpr int kKBlockBytes = 32;  // of channels: one step of the tensor core
inline constexpr int kTapBytes = kBlockN * kKBlockBytes;
inline constexpr int kQuad = 4;        // columns
inline constexpr int kTileQuads = 32;  // a warpgroup's: 128 positions
inline constexpr int kMostStripQuads = 18;
inline constexpr int kMaxConsumers = 3;
inline constexpr int kMaxStages = 8;  // of a ring
inline constexpr int kMaxWindow = 3;  // columns of a filter
// Shares of shared memory, in this order: barriers and the bias, then filter, rings, moments.
inline constexpr int kHeaderBytes = 1024;
inline constexpr int kMomentFloats = 4 * kBlockN;  // of a warp

// Warpgroups that multiply, each with tiles of its own. Where operands are split, a second set of
// accumulators and operands in two parts take the registers of the third.
constexpr int consumers_of(Math math) { return traits_of(math).parts == 2 ? 2 : kMaxConsumers; }

// Columns of the input, beside an output column's own, that the filter reaches.
struct Window {
  int before = 0;
  int after = 0;
  constexpr int size() const { return before + 1 + after; }
  constexpr bool operator==(Window const&) const = default;
};

// Columns by which the quads of every other row begin further left, where an output's width is two
// more than a multiple of four: then each lies where a store may take it whole.
inline constexpr int kStagger = kQuad / 2;
// Whether quads may: of input lines of whole 16 bytes this window alone always has such outputs.
constexpr bool staggers(Window const& window) { return window == Window{2, 0}; }

// Tiles of one shape, which cover `strips` neighbouring strips.
struct Tiling {
  int strips = 0;
  int quads = 0;       // of a strip's row
  int tile_quads = 0;  // of a tile
  int column0 = 0;     // of the output
  int tiles = 0;       // of a strip, in a slice
  // The box that a stage holds. Its columns begin `lead` before the strip's.
  int lead = 0;
  int columns = 0;
  int lines = 0;
  int bytes = 0;

  int width() const { return quads * kQuad; }
  int slice_tiles() const { return strips * tiles; }
};

// What a tile of a block of columns takes, where phases have taps of their own.
struct BlockSteps {
  int k_iterations = 0;
  int filter_rows = 0;

  int all() const { return k_iterations * filter_rows; }
};

// What a launch of one problem looks like. All sizes are counts unless they say bytes.
struct Schedule {
  Support support;
  std::array<Tiling, 2> tilings;  // strips of full width, and the last
  bool is_staggered = false;      // every other row, counted through all slices
  int slice_tiles = 0;
  int tiles = 0;         // of a sample, for each kBlockN output channels
  int blocks_n = 0;      // of kBlockN output channels
  int k_blocks = 0;      // of the input's channels
  int k_iterations = 0;  // stages of a tile; those beyond depth taps times k-blocks are zeros
  // Whether the filter passes through the stages, which the consumers then share: a stage holds a
  // box for each of them and what all multiply it with. Else it stays in shared memory.
  bool streams_filter = false;
  int stages = 0;
  int box_bytes = 0;           // of a stage for one consumer
  int filter_stage_bytes = 0;  // of kBlockN output channels, for a k-iteration: part after part
  int64_t filter_bytes = 0;    // packed, and a counter for each block of output channels
  PhaseBlocks phase_blocks;
  std::vector<BlockSteps> block_steps;  // by phase along depth and height, of its blocks
  int shared_bytes = 0;

  int64_t block_filter_bytes() const { return int64_t(k_iterations) * filter_stage_bytes; }
};

// phases: that are output channels, or null; aligned: the input's address is a multiple of 16
// bytes; padded_lines: so is the distance from one of its lines to the next, whatever their width.
// Where phases have taps of their own, the problem's along depth and height are as many as any of
// them has.
Schedule schedule_of(ConvProblem const& problem, Math math, Window const& window,
                     Phases const* phases, Layout layout, bool aligned, bool padded_lines,
                     Device const& device);

}  // namespace fusedconv::conv::sm90::runs
