// What conv/steps.hpp asks of this kind of convolution.
#pragma once

#include "conv/taps/sm90/passes.hpp"
#include "conv/taps/sm90/rows.hpp"
#include "conv/taps/steps.hpp"

namespace fusedconv::conv {

template <>
struct PartialOf<taps::sm90::Config> {
  using Type = taps::CountedPartial;
};

}  // namespace fusedconv::conv
