// How the GroupNorm passes are cut into blocks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "fusedconv/types.hpp"

namespace fusedconv::groupnorm {

inline constexpr int kThreads = 256;
inline constexpr int64_t kSplitBytes = 128 << 10;  // of a run, per block

// How a block covers rows of channels: `columns` threads side by side, each kVector channels, and
// `lanes` rows at a time.
struct RowMap {
  int columns;
  int lanes;
  int slabs;  // blocks side by side along channels

  static RowMap of(int64_t row_channels, int vector) {
    int64_t const vectors = row_channels / vector;
    int const columns = int(std::min<int64_t>(vectors, kThreads));
    return {columns, kThreads / columns, int(ceil_div(vectors, columns))};
  }
};

// Work split over blocks: at least kSplitBytes each, and no more blocks than a launch needs to be
// balanced.
struct Split {
  int64_t size;
  int count;
};

inline Split split_run(int64_t elements, int64_t element_bytes, int64_t multiple) {
  int64_t const target = round_up(std::max<int64_t>(kSplitBytes / element_bytes, 1), multiple);
  int64_t const count = std::max<int64_t>(1, ceil_div(elements, target));
  int64_t const size = round_up(ceil_div(elements, count), multiple);
  return {size, int(std::max<int64_t>(1, ceil_div(elements, size)))};
}

}  // namespace fusedconv::groupnorm
