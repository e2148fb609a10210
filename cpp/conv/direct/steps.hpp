// What conv/steps.hpp asks of this kind of convolution.
#pragma once

#include "conv/direct/rows.hpp"
#include "conv/steps.hpp"

namespace fusedconv::conv {

template <>
struct PartialOf<direct::Config> {
  using Type = direct::CountedPartial;
};

}  // namespace fusedconv::conv
