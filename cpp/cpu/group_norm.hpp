// Activation, GroupNorm and activation in one call, for tensors in the memory of the processor.
#pragma once

#include "fusedconv/groupnorm.hpp"

namespace fusedconv::cpu {

// Computes in float32 whatever the dtype. The bits do not depend on `threads`, which only bounds
// how many OpenMP threads are used. The output must not overlap the input. A problem without
// elements writes no output, and gives each group that it still has mean 0 and rstd NaN, as PyTorch
// does. Throws InvalidArgument.
void group_norm(GroupNormProblem const& problem, GroupNormTensors const& tensors, int threads);

}  // namespace fusedconv::cpu
