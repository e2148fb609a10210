// Activation, LayerNorm over the channels of each pixel and activation in one call, for tensors in
// the memory of the processor.
#pragma once

#include "fusedconv/groupnorm.hpp"

namespace fusedconv::cpu {

// As group_norm() of group_norm.hpp, with statistics of each pixel over all channels, of which the
// problem's groups are none, and which are not given away. Throws InvalidArgument.
void layer_norm(GroupNormProblem const& problem, GroupNormTensors const& tensors, int threads);

}  // namespace fusedconv::cpu
