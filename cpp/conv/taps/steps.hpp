// What conv/steps.hpp asks of this kind of convolution.
#pragma once

#include "conv/steps.hpp"
#include "conv/taps/passes.hpp"
#include "conv/taps/rows.hpp"

namespace fusedconv::conv {

template <>
struct PartialOf<taps::Config> {
  using Type = taps::CountedPartial;
};

namespace taps {

inline FilterSource weight_of(Problem const& p) {
  return {.c = int64_t(p.channels) * p.groups,
          .k = p.output_channels,
          .t = p.axes[0].kernel,
          .r = p.axes[1].kernel,
          .s = p.axes[2].kernel};
}
inline int64_t output_channels_of(Problem const& p) {
  return int64_t(p.output_channels) * p.groups;
}

}  // namespace taps
}  // namespace fusedconv::conv
