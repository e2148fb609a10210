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

}  // namespace fusedconv::conv
