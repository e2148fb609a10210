// Axes that filters of three taps double, as kernels of their own know them. Host code.
#pragma once

#include "conv/axis.hpp"

namespace fusedconv::conv {

inline constexpr int kDoublingTaps = 3, kDoublingStride = 2;

// Odd padding: so outputs 2 q and 2 q + 1 meet one input, and this and the next.
inline bool is_doubled(AxisProblem const& axis) {
  return axis.kernel == kDoublingTaps && axis.stride == kDoublingStride && axis.dilation == 1 &&
         axis.padding % kDoublingStride == 1;
}

// One position that is passed on.
inline bool is_absent(AxisProblem const& axis) {
  return axis.kernel == 1 && axis.stride == 1 && axis.padding == 0 && axis.input == 1 &&
         axis.output == 1;
}

}  // namespace fusedconv::conv
