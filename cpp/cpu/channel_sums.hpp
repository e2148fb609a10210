// Sums of each channel over samples and pixels, for tensors in the memory of the processor: the
// gradient of a convolution's bias.
#pragma once

#include "fusedconv/groupnorm.hpp"

namespace fusedconv::cpu {

// sums: [channels], of a dense input of the problem's dtype and input layout; its other fields say
// nothing here. The bits do not depend on `threads`. Throws InvalidArgument.
void channel_sums(GroupNormProblem const& problem, void const* input, float* sums, int threads);

}  // namespace fusedconv::cpu
