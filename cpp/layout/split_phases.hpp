// The phases of a stride's output, each as a plane that tensor copies can read, and sums by channel
// on the way.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstdint>

#include "conv/phase_planes.hpp"
#include "fusedconv/types.hpp"
#include "layout/pad_lines.hpp"

namespace fusedconv::layout {

// A tensor [batch, channels, *extents], dense but for lines that may be padded already, and its
// planes [batch, channels, phases, *positions], zero outside the tensor. Axes are depth, height and
// width.
struct PhasesProblem {
  int64_t batch = 0;
  int64_t channels = 0;
  std::array<int, conv::kMaxAxes> extents;
  int64_t pitch = 0;  // elements from one line of the tensor to the next
  std::array<int, conv::kMaxAxes> positions;
  conv::PhasePlanes phases;
  // Whether lines of a plane lie side by side, and planes are padded to whole 16 bytes; else lines.
  bool flat = false;
  DType dtype = DType::kFloat32;

  int64_t vector() const { return 16 / size_of(dtype); }
  int64_t line_elements() const {
    return flat ? positions[2] : round_up(int64_t(positions[2]), vector());
  }
  int64_t plane_elements() const { return round_up(plane_lines() * line_elements(), vector()); }
  // 16-byte vectors that a line touches, lines of a plane, and lines of all planes of a channel
  // that one phase of the width has.
  int64_t line_vectors() const { return ceil_div(int64_t(positions[2]), vector()); }
  int64_t plane_lines() const { return int64_t(positions[0]) * positions[1]; }
  int64_t lines() const { return plane_lines() * phases.axes[0].stride * phases.axes[1].stride; }
  int64_t sample_bytes() const {
    return channels * phases.count() * plane_elements() * size_of(dtype);
  }
  // Whether the planes' lines begin at multiples of 16 bytes.
  bool aligned() const { return line_elements() % vector() == 0; }
  // Whether each element of the tensor is in some plane: behind the last tap's there may be others.
  bool holds_all() const {
    for (int i = 0; i < conv::kMaxAxes; ++i) {
      conv::PhaseAxis const& axis = phases.axes[i];
      if (int64_t(axis.stride) * positions[i] < int64_t(axis.padding) + extents[i]) return false;
    }
    return true;
  }

  // A block's share of a channel: a segment of some lines, for all phases of the width.
  int64_t segment_vectors() const {
    int64_t const most = std::max<int64_t>(1, kTileVectors / phases.axes[2].stride);
    return ceil_div(line_vectors(), ceil_div(line_vectors(), most));
  }
  int64_t segments() const { return ceil_div(line_vectors(), segment_vectors()); }
  int64_t tile_lines() const {
    int64_t const most = kTileVectors / (segment_vectors() * phases.axes[2].stride);
    return std::clamp<int64_t>(most, 1, std::min(kMostTileLines, lines()));
  }
  int64_t tiles() const { return segments() * ceil_div(lines(), tile_lines()); }
  ChannelSums sums() const { return {batch, channels, tiles(), dtype}; }

  static constexpr int64_t kTileVectors = 1024;
  static constexpr int64_t kMostTileLines = 128;
};

// output's address is a multiple of 16 bytes; sums, for problem.sums(), may be null.
void split_phases(PhasesProblem const& problem, void const* input, void* output, float* sums,
                  cudaStream_t stream);

}  // namespace fusedconv::layout
