// The tensor maps of what is multiplied, in the order W, H, D, C, N.
#pragma once

#include <cuda.h>

#include "conv/sm90/wgrad/rows.hpp"

namespace fusedconv::conv::sm90::wgrad {

// For boxes of a strip's line of kBlock channels, with a swizzle of as many bytes.
CUtensorMap input_map(Arguments const& arguments);

// For boxes of the columns that a strip's taps reach, of a task's output channels, at a pitch of
// schedule.pitch_bytes.
CUtensorMap grad_map(Arguments const& arguments);

}  // namespace fusedconv::conv::sm90::wgrad
