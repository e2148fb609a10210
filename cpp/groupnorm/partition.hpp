// How the passes are cut into blocks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "fusedconv/groupnorm.hpp"

namespace fusedconv::groupnorm {

inline constexpr int kThreads = 256;
inline constexpr int kLoads = 4;                   // 16-byte loads in flight per thread
inline constexpr int64_t kSplitBytes = 128 << 10;  // of a run, per block

// Of a plane, per block of a pass that reads and writes it. What all blocks have under way then
// lies close together in memory, which is worth a third of the rate of blocks with runs of 128 KiB
// (4.0 against 3.1 TB/s on an H200).
inline constexpr int64_t kRunBytes = 8 << 10;
// The same where a block has more to prepare and sums up in the end.
inline constexpr int64_t kLinesRunBytes = 32 << 10;

// How a block covers a channels-last tensor: `columns` threads side by side, each kVector channels,
// and `rows` rows of channels at a time.
struct RowMap {
  int columns;
  int rows;
  int slabs;  // blocks side by side along channels

  static RowMap of(int64_t row_channels, int vector) {
    int64_t const vectors = row_channels / vector;
    int const columns = int(std::min<int64_t>(vectors, kThreads));
    return {columns, kThreads / columns, int(ceil_div(vectors, columns))};
  }
};

// Work split over blocks, of some bytes each.
struct Split {
  int64_t size;
  int count;
};

inline Split split_run(int64_t elements, int64_t element_bytes, int64_t multiple,
                       int64_t split_bytes = kSplitBytes) {
  int64_t const target = round_up(std::max<int64_t>(split_bytes / element_bytes, 1), multiple);
  int64_t const count = std::max<int64_t>(1, ceil_div(elements, target));
  int64_t const size = round_up(ceil_div(elements, count), multiple);
  return {size, int(std::max<int64_t>(1, ceil_div(elements, size)))};
}

// Rows that a thread takes the moments of at a time: as many loads are under way.
constexpr int moment_rows(int64_t element_bytes) { return element_bytes == 2 ? 4 : 8; }

// Row blocks come out the same for every number of samples, so that the bits of a result do not
// depend on how a batch is cut.
inline Split split_rows(GroupNormProblem const& p) {
  int64_t const size = size_of(p.dtype), channels = p.input_row_channels();
  int const vector = int(16 / size);
  int const rows = RowMap::of(channels, channels % vector == 0 ? vector : 1).rows;
  return split_run(p.pixels, channels * size, rows * moment_rows(size));
}

// Of a plane, in a pass that reads it and writes it, dense or in lines.
inline Split split_planes(GroupNormProblem const& p, bool lines) {
  int64_t const bytes = size_of(p.dtype);
  return split_run(p.pixels, bytes, 16 / bytes, lines ? kLinesRunBytes : kRunBytes);
}

// Rows of gradients that a thread loads at a time.
constexpr int rows_ahead(int64_t element_bytes) { return element_bytes == 2 ? 4 : 2; }
// Of them, per block of the pass that stores gradients.
inline constexpr int64_t kGradientRowsBytes = 64 << 10;
// Blocks that load the memory fully, in a pass over rows of gradients.
inline constexpr int64_t kFullBlocks = 528;

// Of a block in a pass over rows of gradients that blocks of `bytes` serve best: fewer where that
// leaves multiprocessors without work.
inline int64_t gradient_block_bytes(GroupNormProblem const& p, int64_t bytes) {
  int64_t const all = p.batch * p.pixels * p.channels * size_of(p.dtype);
  while (bytes > kRunBytes && all < kFullBlocks * bytes) bytes /= 2;
  return bytes;
}

// Of rows of channels, in such a pass.
inline Split split_rows_of_gradients(GroupNormProblem const& p, int64_t bytes) {
  int64_t const size = size_of(p.dtype), row = p.channels * size;
  int const vector = int(16 / size);
  int const rows = RowMap::of(p.channels, p.channels % vector == 0 ? vector : 1).rows;
  return split_run(p.pixels, row, rows * rows_ahead(size), gradient_block_bytes(p, bytes));
}

// The same, of the pass that stores gradients.
inline Split split_gradient_rows(GroupNormProblem const& p) {
  return split_rows_of_gradients(p, kGradientRowsBytes);
}

// Rows of a gradient that a thread takes at a time: of one wider than the problem's tensors as many
// bytes.
constexpr int gradient_rows_ahead(int64_t element_bytes, int64_t grad_bytes) {
  return rows_ahead(element_bytes) / int(grad_bytes / element_bytes);
}

// How a block covers rows of channels that it stores as planes, tile by tile: a channel has a run
// as long as a tile has rows. With tiles of 64 rows of 64 channels in float32, lines of 258 take
// 1.83 ms where tiles of 32 take 2.26 (H200, 2.2 GB each of input, gradient and result).
struct PlaneTiles {
  static constexpr int kMostColumns = 16;
  static constexpr int kMultiple = 8;  // of the map's rows

  RowMap map;
  int rows;  // of a tile

  // Of a tile's, those of a thread.
  static constexpr int ahead(int64_t element_bytes, int64_t grad_bytes) {
    return 4 / int(grad_bytes / element_bytes);
  }

  static PlaneTiles of(int64_t channels, int vector, int ahead) {
    int64_t const vectors = channels / vector;
    int const slabs = int(ceil_div(vectors, kMostColumns));
    int const columns = int(ceil_div(vectors, slabs));
    int const rows = std::min(kThreads / columns, kThreads / ahead) / kMultiple * kMultiple;
    return {{columns, rows, slabs}, rows * ahead};
  }
};

// Of rows of channels, in the pass that stores gradients as planes.
inline Split split_rows_to_planes(GroupNormProblem const& p) {
  int64_t const size = size_of(p.dtype);
  int const vector = int(16 / size), ahead = PlaneTiles::ahead(size, size_of(p.output_dtype));
  auto const tiles = PlaneTiles::of(p.channels, p.channels % vector == 0 ? vector : 1, ahead);
  int64_t const row = std::min<int64_t>(p.channels, tiles.map.columns * vector) * size;
  return split_run(p.pixels, row, tiles.rows, gradient_block_bytes(p, kGradientRowsBytes));
}

// Of a plane, or of rows of channels, in the pass that sums gradients.
inline Split split_gradients(GroupNormProblem const& p) {
  int64_t const bytes = size_of(p.dtype);
  if (p.input_layout == Layout::kChannelsFirst) return split_run(p.pixels, bytes, 16 / bytes);
  return split_rows_of_gradients(p, kSplitBytes);
}

}  // namespace fusedconv::groupnorm
