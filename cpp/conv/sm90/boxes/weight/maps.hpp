// Tensor maps of the input and of the output's gradient.
#pragma once

#include "conv/sm90/boxes/weight/params.hpp"

namespace fusedconv::conv::sm90::boxes::weight {

// Throws KernelFailure, which names the row and the problem.
Maps maps_of(Arguments const& arguments);

}  // namespace fusedconv::conv::sm90::boxes::weight
