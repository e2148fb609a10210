// How a transposed convolution of few output channels is cut into blocks that add up columns. Host
// code without CUDA.
//
// All products of a position, of every output channel at every tap, are one row of a matrix
// product: what im2col is to a convolution's input, its transpose col2im is to this one's result. A
// block multiplies a box of positions by the whole weight, leaves the products in shared memory and
// adds up there, for each output of its tile, those that belong to it. So the input is read once
// whatever the taps, no product is of a channel that is not there, and the weight's lines are read
// as they lie: an input channel's output channels and taps beside each other, in any order. Boxes
// of neighbouring tiles overlap by what the filter reaches.
#pragma once

#include <array>
#include <cstdint>

#include "conv/math_table.hpp"
#include "conv/transposed.hpp"
#include "fusedconv/device.hpp"
#include "fusedconv/support.hpp"
#include "fusedconv/types.hpp"

namespace fusedconv::conv::sm90::col2im {

inline constexpr int kConsumers = 2;    // groups of four warps that multiply
inline constexpr int kWarpgroup = 128;  // threads of one
inline constexpr int kConsumerThreads = kConsumers * kWarpgroup;
inline constexpr int kSlab = 64;         // positions of one instruction
inline constexpr int kChunkBytes = 128;  // of a position's channels, copied at a time
inline constexpr int kStepBytes = 32;    // of one instruction
inline constexpr int kLine = 64;         // columns that lie together of 16 bits: 128 bytes
inline constexpr int kMostColumns = 272;
inline constexpr int kMostInstruction = 256;  // columns of one
inline constexpr int kMostStages = 6;
inline constexpr int kBarrierBytes = 128;      // behind all else; behind them channels' maps, and:
inline constexpr int kReachBytes = 16;         // for each output of a tile along each axis
inline constexpr int kMostSkew = 6;            // of where a row of products begins, in floats
inline constexpr int kTogether = 4;            // channels of an output pixel that a thread adds up
inline constexpr int kStagedBytes = 24 << 10;  // of outputs on their way to memory, at most
inline constexpr int kMapBytes = 8;            // of an output channel

// What a compiled kernel fixes: columns (output channels of taps) and slabs of a group of warps.
struct Shape {
  int columns, slabs;

  constexpr int positions() const { return kConsumers * slabs * kSlab; }
  // From a position's products to the next one's, in floats: eight of them meet all banks, and a
  // row's skew has room.
  constexpr int pitch() const { return columns + 8; }
  // A row more is zeros.
  constexpr int products_bytes() const { return (positions() + 1) * pitch() * 4; }
  constexpr int filter_bytes(int element_bytes) const {
    return element_bytes == 2 ? int(ceil_div(columns, kLine)) * kLine * kChunkBytes
                              : columns * kChunkBytes;
  }
  constexpr int stage_bytes(int element_bytes) const {
    return positions() * kChunkBytes + filter_bytes(element_bytes);
  }
};

// Lines of a tile's outputs, or pieces of longer ones, on their way to memory.
struct Pieces {
  int pixels = 0, of_line = 0;
  int pitch = 0;           // from one to the next, in elements: whole 16 bytes
  int together = 0;        // staged at a time
  int share_channels = 0;  // of a pixel, that a thread has at a time
};

struct Schedule {
  Support support;
  std::array<Axis, kMaxAxes> axes;
  int box[kMaxAxes] = {};    // positions of a block by axis
  int tile[kMaxAxes] = {};   // outputs, whole strides
  int tiles[kMaxAxes] = {};  // of a sample
  int chunks = 0;            // of channels
  int stages = 0;
  int columns = 0;           // of a packed filter
  int64_t filter_bytes = 0;  // packed
  Pieces pieces;
  int reserved = 0;  // where barriers begin in shared memory
  int reaches = 0;   // where those of a tile's outputs begin there
  int shared_bytes = 0;
  double block_cycles = 0.0;  // estimated

  // At most two taps along height and width, one along depth.
  bool has_short_taps() const {
    return axes[0].taps <= 1 && axes[1].taps <= 2 && axes[2].taps <= 2;
  }
  int64_t sample_tiles() const { return int64_t(tiles[0]) * tiles[1] * tiles[2]; }
};

Schedule schedule_of(TransposedProblem const& problem, Shape const& shape, Math math,
                     Device const& device);

}  // namespace fusedconv::conv::sm90::col2im
