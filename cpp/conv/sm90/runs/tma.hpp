// The tensor maps of the input.
#pragma once

#include <cuda.h>

#include "conv/sm90/runs/rows.hpp"

namespace fusedconv::conv::sm90::runs {

// The input [N, C, D, H, W] in the order W, C, H, D, N, for boxes of a k-block of a tiling's lines;
// an empty map where the tiling has no tiles.
CUtensorMap input_map(Arguments const& arguments, Tiling const& tiling);

}  // namespace fusedconv::conv::sm90::runs
