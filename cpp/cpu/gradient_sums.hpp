// Sums of each channel that gradients through an affine map of channels are made of: partial ones
// of rows of lanes, and totals.
#pragma once

#include <algorithm>
#include <cstdint>

namespace fusedconv::cpu {

// Of a channel: the sums of g, and of g times what the weight multiplies.
struct GradientSums {
  double gradient = 0.0, moment = 0.0;
};

// Replaces `sums` by those of lanes that were summed by themselves; `lanes` are whole pixels.
inline void sum_lanes(float const* gradient, float const* moment, int64_t lanes, int64_t channels,
                      GradientSums* sums) {
  std::fill_n(sums, channels, GradientSums{});
  for (int64_t lane = 0; lane < lanes; lane += channels) {
    for (int64_t channel = 0; channel < channels; ++channel) {
      sums[channel].gradient += static_cast<double>(gradient[lane + channel]);
      sums[channel].moment += static_cast<double>(moment[lane + channel]);
    }
  }
}

// Replaces `totals` by the sums of `pieces` rows of them, in the order of memory: a channel's are a
// whole row of channels apart.
inline void sum_pieces(GradientSums const* rows, int64_t pieces, int64_t channels,
                       GradientSums* totals) {
  std::fill_n(totals, channels, GradientSums{});
  for (int64_t piece = 0; piece < pieces; ++piece, rows += channels) {
    for (int64_t channel = 0; channel < channels; ++channel) {
      totals[channel].gradient += rows[channel].gradient;
      totals[channel].moment += rows[channel].moment;
    }
  }
}

}  // namespace fusedconv::cpu
