// The schedule of a transposed convolution of stride 1 on Hopper's warpgroup tensor cores. Host
// code without CUDA.
//
// The output positions of a sample form a raster: rows of `pitch_w` positions, `pitch_h` rows per
// slice of depth. The gap that a pitch leaves beside the data stands for the zeros that pad the
// input, so a filter tap is a constant distance along the raster: a block stages a run of input
// positions once and reads it for every tap at a shifted address. With the padding k - 1 of a plain
// transposed convolution the pitch equals the output's own width and the raster is the output plane
// itself.
//
// In the instruction's terms M counts output channels, N positions of the raster and K what is
// summed: a k-block is 32 bytes of input channels, a k-iteration what one pipeline stage holds.
#pragma once

#include <array>
#include <cstdint>

#include "conv/math_table.hpp"
#include "conv/problem.hpp"
#include "fusedconv/device.hpp"
#include "fusedconv/support.hpp"
#include "fusedconv/types.hpp"

namespace fusedconv::conv::sm90 {

inline constexpr int kArchitecture = 90;
inline constexpr int kBlockM = 64;       // output channels of a warpgroup's tile
inline constexpr int kKBlockBytes = 32;  // of channels: one step of the tensor core
inline constexpr int kMaxStagedPositions = 1024;
inline constexpr int kMaxStages = 8;
inline constexpr int kMaxTmaExtent = 256;   // of a box along an axis
inline constexpr int kConsumers = 2;        // warpgroups
inline constexpr int kBarrierBytes = 1024;  // the barriers' share of shared memory, at its start

// How the two consuming warpgroups share the work.
enum class Sharing : int {
  kPingPong,      // a tile each, in turns; the filter of 64 channels stays in shared memory
  kCooperativeM,  // the same positions, 64 channels each; the filter passes through the stages
  kCooperativeN,  // the same channels, neighbouring positions; the filter as in kCooperativeM
};

}  // namespace fusedconv::conv::sm90

namespace fusedconv {

template <>
inline constexpr std::array kNames<conv::sm90::Sharing>{"ping_pong", "cooperative_m",
                                                        "cooperative_n"};

}  // namespace fusedconv

namespace fusedconv::conv::sm90 {

// What a compiled kernel fixes of a tile.
struct TileShape {
  Math math;
  Sharing sharing;

  constexpr MathTraits const& traits() const { return traits_of(math); }
  constexpr int parts() const { return traits().parts; }
  constexpr int element_bytes() const { return traits().element_bytes(); }
  constexpr bool keeps_filter() const { return sharing == Sharing::kPingPong; }
  constexpr int blocks_m() const { return sharing == Sharing::kCooperativeM ? 2 : 1; }
  // Positions of a warpgroup's tile. Strict fp32 holds two accumulators.
  constexpr int block_n() const { return math == Math::kTf32x3 ? 128 : 256; }
  // Of a block's tile: output channels, positions, channels of a k-block.
  constexpr int m() const { return kBlockM * blocks_m(); }
  constexpr int n() const { return block_n() * (sharing == Sharing::kCooperativeN ? 2 : 1); }
  constexpr int k() const { return kKBlockBytes / element_bytes(); }
};

// What a launch of one problem looks like. All sizes are counts unless they say bytes.
struct Schedule {
  Support support;
  // The raster. Wide planes are cut into strips of columns, each with a raster of its own.
  int pitch_w = 0;
  int pitch_h = 0;
  int strips = 1;
  int strip_width = 0;  // output columns that a strip covers
  bool linear = false;  // the raster is the output plane
  int positions = 0;    // of a strip's raster
  // Tiles.
  int block_n = 0;
  int tiles_n = 0;          // along a strip's raster
  int tiles_m = 0;          // along the output's channels
  int warpgroup_tiles = 0;  // of a sample for each 64 output channels
  // The main loop. A k-iteration is one depth tap, filter_rows_per_stage rows of taps and
  // k_blocks_per_stage k-blocks.
  int k_blocks = 0;
  int k_iterations = 0;
  int k_blocks_per_stage = 1;
  int filter_rows_per_stage = 1;
  int staged_positions = 0;  // of the input
  int staged_row_pitch = 0;  // staged positions from one filter row's to the next's
  int plane_pitch = 0;       // staged positions, padded against bank conflicts
  // The pipeline.
  int stages = 0;
  int filter_stage_bytes = 0;
  int input_stage_bytes = 0;
  int shared_bytes = 0;
  // Where TMA loads the input: rows of it land in a ring of their own and are transposed to stages.
  bool tma = false;            // else the input is loaded by element
  int input_rows = 0;          // that a stage may touch
  int input_row_elements = 0;  // of a row as it lands, per channel
  int tma_stages = 0;
  int tma_stage_bytes = 0;

  int64_t filter_bytes = 0;  // packed
};

// aligned: the input's address is a multiple of 16 bytes.
Schedule schedule_of(ConvProblem const& problem, TileShape const& tile, Layout layout, bool aligned,
                     Device const& device);

}  // namespace fusedconv::conv::sm90
