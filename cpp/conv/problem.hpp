// The convolution that every family of kernels computes. No CUTLASS, no CUDA here.
#pragma once

#include <cstdint>

namespace fusedconv::conv {

// Letters, as in CUTLASS: N batch, C input channels, K output channels; D H W input, Z P Q output
// and T R S filter extents along depth, height and width.
//
// A stride-1 forward convolution of a channels-last tensor [N, D, H, W, C] with a packed filter
// [K, T, R, S, C] into [N, Z, P, Q, K]. A transposed convolution of stride 1 lowers to it with the
// filter flipped, its channel axes swapped and lower_padding = dilation (extent - 1) - padding.
struct ConvProblem {
  int n = 0, c = 0, k = 0;
  int d = 1, h = 1, w = 1;
  int z = 1, p = 1, q = 1;
  int t = 1, r = 1, s = 1;
  int lower_padding_d = 0, lower_padding_h = 0, lower_padding_w = 0;
  int dilation_d = 1, dilation_h = 1, dilation_w = 1;
};

// Sub-pixel phases of a strided transposed convolution as output channels of one of stride 1, whose
// channel k is channel k / all() of the tensor and one of that one's phases, by depth, height and
// width.
struct Phases {
  struct Axis {
    int count = 1;  // the stride
    int kernel = 1;
    int padding = 0;

    // The weight's tap by which phase r reads input q + delta for position q; there may be none.
    constexpr int tap(int phase, int delta) const { return phase + padding - count * delta; }
  };
  Axis d, h, w;

  constexpr int all() const { return d.count * h.count * w.count; }
};

// A transposed convolution's weight [C, K, T, R, S] of any strides, in elements.
struct FilterSource {
  int64_t c = 0, k = 0, t = 1, r = 1, s = 1;
  int64_t stride_c = 0, stride_k = 0, stride_t = 0, stride_r = 0, stride_s = 0;

  int64_t taps() const { return t * r * s; }
  // From a tap to the next of the innermost axis that has several; of one any will do.
  int64_t tap_stride() const {
    return s > 1 ? stride_s : r > 1 ? stride_r : t > 1 ? stride_t : stride_k;
  }
};

}  // namespace fusedconv::conv
