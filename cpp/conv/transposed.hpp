// A transposed convolution as the kernels see it that read its tensors as they lie. No CUDA here.
#pragma once

#include <array>
#include <cstdint>

#include "conv/axis.hpp"
#include "conv/problem.hpp"
#include "fusedconv/types.hpp"

namespace fusedconv::conv {

inline constexpr int kMaxAxes = 3;  // depth, height, width

// Of a batch of any size. Axes are depth, height and width; channels are those of one group.
struct TransposedProblem {
  int channels = 0;
  int output_channels = 0;
  int groups = 1;
  std::array<AxisProblem, kMaxAxes> axes;
  Layout layout = Layout::kChannelsFirst;  // of input and output
  bool aligned = true;                     // the input's address is a multiple of 16 bytes
};

// The extents that its weight has, and all its output channels.
inline FilterSource weight_of(TransposedProblem const& p) {
  return {.c = int64_t(p.channels) * p.groups,
          .k = p.output_channels,
          .t = p.axes[0].kernel,
          .r = p.axes[1].kernel,
          .s = p.axes[2].kernel};
}
inline int64_t output_channels_of(TransposedProblem const& p) {
  return int64_t(p.output_channels) * p.groups;
}

}  // namespace fusedconv::conv
