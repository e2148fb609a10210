// Lines, channels first, that filters of more than one stride and up to two upsample, as vocoders
// have them and kernels of their own know them. Host code.
#pragma once

#include <algorithm>
#include <cstdint>

#include "conv/transposed.hpp"
#include "fusedconv/check.hpp"
#include "fusedconv/support.hpp"
#include "fusedconv/types.hpp"

namespace fusedconv::conv {

inline constexpr int64_t kMostPositions = int64_t(1) << 30;  // of a line, with its padding

// Whether the problem is one. Copies of its input begin at multiples of so many positions.
inline Support is_upsampled_line(TransposedProblem const& p, int granule) {
  if (p.layout != Layout::kChannelsFirst) return Support::no("the layout is channels last");
  if (p.groups != 1) return Support::no("the convolution has groups");
  if (!p.aligned) return Support::no("the input begins at no multiple of 16 bytes");
  for (int a = 0; a < kMaxAxes - 1; ++a) {
    AxisProblem const& other = p.axes[a];
    // Padding may keep the one product of such an axis off its one output.
    if (other.input != 1 || other.output != 1 || other.kernel != 1 || other.padding != 0) {
      return Support::no("the convolution has more than one axis");
    }
  }
  AxisProblem const& axis = p.axes[kMaxAxes - 1];
  if (axis.dilation != 1) return Support::no("the filter is dilated");
  if (axis.kernel <= axis.stride || axis.kernel > 2 * int64_t(axis.stride)) {
    return Support::no(detail::join("the filter has ", axis.kernel, " taps, more than the stride ",
                                    axis.stride, " and up to two are served"));
  }
  if (p.channels < 1 || p.output_channels < 1 || axis.input < 1 || axis.output < 1) {
    return Support::no("the input or the output is empty");
  }
  if (axis.input % granule != 0) {
    return Support::no(detail::join("lines of ", axis.input, " positions are no whole 16 bytes"));
  }
  int64_t const padded = int64_t(axis.output) + 2 * int64_t(axis.padding);
  if (std::max<int64_t>(axis.input, padded) > kMostPositions) {
    return Support::no(detail::join("lines have ", axis.input, " positions and ", padded,
                                    " outputs and padding, up to ", kMostPositions, " are served"));
  }
  return Support::yes();
}

}  // namespace fusedconv::conv
