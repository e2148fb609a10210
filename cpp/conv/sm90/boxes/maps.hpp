// Tensor maps of the input and of the output's phases.
#pragma once

#include "conv/sm90/boxes/copies.hpp"
#include "conv/sm90/boxes/rows.hpp"

namespace fusedconv::conv::sm90::boxes {

// slabs: those of the arguments' batch. Throws KernelFailure, which names the row and the problem.
Maps maps_of(Arguments const& arguments, Slabs const& slabs);

}  // namespace fusedconv::conv::sm90::boxes
