// Lines of a channels-first tensor padded to whole 16 bytes, as tensor copies want them, and sums
// by channel on the way.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "fusedconv/types.hpp"

namespace fusedconv::layout {

// Sums of planes in parts, float32 [batch, channels, parts], and the type of their totals.
struct ChannelSums {
  int64_t batch = 0;
  int64_t channels = 0;
  int64_t parts = 0;
  DType dtype = DType::kFloat32;

  int64_t bytes() const { return batch * channels * parts * int64_t(sizeof(float)); }
};

// A tensor [batch, channels, lines, columns], dense but for lines that may be padded already.
struct LinesProblem {
  int64_t batch = 0;
  int64_t channels = 0;
  int64_t lines = 0;
  int64_t columns = 0;
  int64_t pitch = 0;  // elements from one line to the next
  DType dtype = DType::kFloat32;

  // 16-byte vectors of a padded line, and of a plane of them.
  int64_t line_vectors() const { return ceil_div(columns * size_of(dtype), 16); }
  int64_t plane_vectors() const { return lines * line_vectors(); }
  int64_t sample_bytes() const { return channels * plane_vectors() * 16; }
  // Blocks that share a plane, each of which leaves a sum.
  int64_t splits() const { return std::max<int64_t>(1, ceil_div(plane_vectors(), kSplitVectors)); }
  ChannelSums sums() const { return {batch, channels, splits(), dtype}; }

 private:
  static constexpr int64_t kSplitVectors = 8192;
};

// Zeros behind each line. output, whose address is a multiple of 16 bytes, or sums, for
// problem.sums(), may be null.
void pad_lines(LinesProblem const& problem, void const* input, void* output, float* sums,
               cudaStream_t stream);

// Adds up the parts in a fixed order: totals is [channels].
void add_sums(ChannelSums const& problem, float const* sums, void* totals, cudaStream_t stream);

}  // namespace fusedconv::layout
