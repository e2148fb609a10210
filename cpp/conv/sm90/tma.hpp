// The tensor map of the input.
#pragma once

#include <cuda.h>

#include "conv/sm90/rows.hpp"

namespace fusedconv::conv::sm90 {

// The input as a tensor of five axes, for boxes of one row of a k-block; rounded to TF32 on the way
// where that is the mode.
CUtensorMap input_map(Arguments const& arguments);

}  // namespace fusedconv::conv::sm90
