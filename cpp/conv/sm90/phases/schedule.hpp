// How a transposed convolution of three taps and stride two, channels last and of 16 bits, is cut
// into blocks. Host code without CUDA.
//
// Outputs 2 q and 2 q + 1 of each axis are of one position q: along an axis the even one meets one
// input, the odd one this and the next. So all sub-pixel phases of a box of positions together read
// two inputs an axis, its neighbours. A group of four warps has sums of the four phases along
// height and width at once and multiplies the inputs of each neighbour by the filter's tap of each
// phase that meets it. The filter stays in shared memory; boxes of the input with a halo come by
// tensor copies, once for all neighbours and phases.
//
// With a depth, a box has two planes of outputs, even and odd, whose sums other groups have: those
// of both would be twice as many, for which registers of few warps have room, and few do not finish
// outputs as fast as others multiply.
//
// An instruction has the columns of one phase: those of neighbouring phases at once would be wider,
// but phases that meet one neighbour are others than those that meet another, and ptxas keeps sums
// of instructions in place that are either the same or apart.
#pragma once

#include <array>
#include <cstdint>

#include "conv/doubled_axis.hpp"
#include "conv/math_table.hpp"
#include "conv/transposed.hpp"
#include "fusedconv/device.hpp"
#include "fusedconv/support.hpp"
#include "fusedconv/types.hpp"

namespace fusedconv::conv::sm90::phases {

inline constexpr int kTaps = kDoublingTaps, kStride = kDoublingStride;  // of axes with a stride
inline constexpr int kEdge = 8;               // positions of a tile along height and width
inline constexpr int kRows = kEdge * kEdge;   // of one instruction
inline constexpr int kHaloEdge = kEdge + 1;   // inputs that they read
inline constexpr int kChunk = 64;             // channels of a copy
inline constexpr int kRowBytes = kChunk * 2;  // of an input
inline constexpr int kStepChannels = 16;      // of one instruction
inline constexpr int kVector = 8;             // channels that are copied or stored at once
inline constexpr int kLeastStages = 2, kMostStages = 8;
inline constexpr int kBarrierBytes = 256;
inline constexpr int kStageAlignment = 1024;  // of the pattern by which copies exchange 16 bytes

// Bits of a phase, or of a neighbour: width 1, height 2, depth 4.
inline constexpr int kWidth = 1, kHeight = 2, kDepth = 4;
// Along height and width: phases, and their products.
inline constexpr int kPhases = 4, kProducts = kTaps * kTaps;

// What a compiled kernel fixes.
struct Shape {
  int axes;      // that are not absent: height and width, and depth
  int channels;  // of the output, of a block

  // Of outputs, of a tile.
  constexpr int planes() const { return axes == kMaxAxes ? kStride : 1; }
  // Of a plane's outputs.
  constexpr int plane_columns() const { return kPhases * channels; }
  constexpr int columns() const { return planes() * plane_columns(); }
  // Products of planes: along depth.
  constexpr int depth_products() const { return axes == kMaxAxes ? kTaps : 1; }
  constexpr int taps() const { return depth_products() * kProducts; }
  // Groups of four warps that multiply: as many as have registers for a plane's sums and for
  // finishing them.
  constexpr int consumers() const { return plane_columns() <= 192 ? 3 : 2; }
};

// A phase's product with one of its neighbours.
struct Product {
  int neighbour, phase;
};

// Of all neighbours along height and width in turn. An odd phase meets the next input along an axis
// too, an even one does not.
struct Products {
  Product values[kProducts]{};

  constexpr Products() {
    int count = 0;
    for (int neighbour = 0; neighbour < kPhases; ++neighbour) {
      for (int phase = 0; phase < kPhases; ++phase) {
        if ((phase & neighbour) == neighbour) values[count++] = {neighbour, phase};
      }
    }
  }
};

// Of planes: bits of depth of the even one's only product, and of the odd one's two.
constexpr Product depth_product(int number) {
  return {number == 2 ? kDepth : 0, number > 0 ? kDepth : 0};
}

// All products of 16 channels along height and width by one along depth, as the packed filter has
// them one behind the other.
struct Round {
  int depth_product, step;
};

// The even plane's, then the odd one's, both of each step.
constexpr Round round_of(int number, int steps) {
  if (number < steps) return {0, number};
  return {1 + (number - steps) % 2, (number - steps) / 2};
}

// The tap of a phase by which it meets a neighbour, along an axis whose bit they have or have not.
constexpr int tap_of(bool odd, bool next) { return odd ? (next ? 0 : 2) : 1; }

// The output channel of a column of a phase: the instruction leaves columns 8 j + 2 t and the next
// in lane t of four, which so has 8 neighbouring channels of each 32, and 4 of what is left.
constexpr int channel_of(int column, int channels) {
  int const eight = column / 8, lane = column % 8 / 2, half = column % 2;
  int const whole = channels / 32 * 32;
  if (eight < whole / 8) return eight / 4 * 32 + lane * 8 + eight % 4 * 2 + half;
  return whole + lane * 4 + eight % 4 * 2 + half;
}

struct Schedule {
  Support support;
  std::array<int, kMaxAxes> shift{};  // of the input that an even phase meets, less its position
  std::array<int, kMaxAxes> positions{};  // of all phases
  std::array<int, kMaxAxes> tiles{};
  int part_tiles = 0;  // of which one partial moment is left for each consumer
  int parts = 0;       // of a sample
  int channel_blocks = 0;
  int chunks = 0;        // of channels
  int steps = 0;         // of kStepChannels
  int halo_rows = 0;     // inputs of a box
  int stage_bytes = 0;   // of a chunk of them
  int kept_bytes = 0;    // of the filter, a block's
  int ring_offset = 0;   // of the stages behind it
  int values_bytes = 0;  // of channels and of moments
  int stages = 0;
  int64_t filter_bytes = 0;  // packed
  int shared_bytes = 0;
  double tile_cycles = 0.0;  // estimated: products

  int sample_tiles() const { return tiles[0] * tiles[1] * tiles[2]; }
};

Schedule schedule_of(TransposedProblem const& problem, Shape const& shape, Math math,
                     Device const& device);

}  // namespace fusedconv::conv::sm90::phases
