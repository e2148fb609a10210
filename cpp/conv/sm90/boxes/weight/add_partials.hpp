// The pass behind the kernel.
#pragma once

#include <cuda_runtime_api.h>

#include "conv/problem.hpp"
#include "conv/sm90/boxes/weight/rows.hpp"

namespace fusedconv::conv::sm90::boxes::weight {

// Adds each task's partial sums in a fixed order. weight: the gradient's extents and strides, as
// those of the weight: `c` its output channels, which the gradient's convolution reads, `k` its
// input channels. What the config has beyond these is left out.
void add_partials(Config const& config, FilterSource const& weight, float const* partials,
                  void* grad_weight, cudaStream_t stream);

}  // namespace fusedconv::conv::sm90::boxes::weight
