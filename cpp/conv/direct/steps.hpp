// What conv/steps.hpp asks of this kind of convolution, and the step that normalises as well.
#pragma once

#include "conv/direct/rows.hpp"
#include "conv/steps.hpp"

namespace fusedconv::conv {

template <>
struct PartialOf<direct::Config> {
  using Type = direct::CountedPartial;
};

}  // namespace fusedconv::conv
