// Gradients of a strided transposed convolution as those of one of stride 1, whose output has a
// channel for each of the stride's phases. No CUDA here.
//
// Along one axis, output o sums weight[t] input[i] over o = stride i + dilation t - padding. Phase
// r's plane has position q at output stride q + r - padding. With dilation t = stride m + r, tap t
// takes input i to position i + m of that plane: m is the tap of the convolution of stride 1, and
// where dilation does not divide stride m + r, or the quotient is no tap, it has a zero.
#pragma once

#include <array>

#include "conv/transposed.hpp"

namespace fusedconv::conv {

struct PhaseAxis {
  int kernel = 1;
  int stride = 1;
  int padding = 0;
  int dilation = 1;

  // Taps of the convolution of stride 1.
  constexpr int taps() const { return dilation * (kernel - 1) / stride + 1; }
  // The weight's tap that is tap m for a phase; kNoTap if none is.
  static constexpr int kNoTap = -1;
  FUSEDCONV_HOST_DEVICE int tap(int phase, int m) const {
    int const reached = stride * m + phase;
    int const result = reached / dilation;
    return result < kernel && result * dilation == reached ? result : kNoTap;
  }
};

// Axes are depth, height and width. Channel c's phases are channels of the planes, as [c, depth,
// height, width].
struct PhasePlanes {
  std::array<PhaseAxis, kMaxAxes> axes;

  // One phase, whose taps are the weight's.
  static constexpr PhasePlanes whole(int t, int r, int s) {
    return {{PhaseAxis{.kernel = t}, PhaseAxis{.kernel = r}, PhaseAxis{.kernel = s}}};
  }
  // Of one channel.
  FUSEDCONV_HOST_DEVICE int count() const {
    return axes[0].stride * axes[1].stride * axes[2].stride;
  }
  bool dilates() const {
    return axes[0].dilation != 1 || axes[1].dilation != 1 || axes[2].dilation != 1;
  }
  // The weight's channel and taps that a plane's channel and taps are; no taps if any axis has
  // none.
  struct Source {
    int channel, t, r, s;
    FUSEDCONV_HOST_DEVICE bool exists() const {
      return t != PhaseAxis::kNoTap && r != PhaseAxis::kNoTap && s != PhaseAxis::kNoTap;
    }
  };
  FUSEDCONV_HOST_DEVICE Source source(int channel, int t, int r, int s) const {
    int rest = channel;
    int const width = rest % axes[2].stride;
    rest /= axes[2].stride;
    int const height = rest % axes[1].stride;
    rest /= axes[1].stride;
    int const depth = rest % axes[0].stride;
    return {rest / axes[0].stride, axes[0].tap(depth, t), axes[1].tap(height, r),
            axes[2].tap(width, s)};
  }
};

}  // namespace fusedconv::conv
