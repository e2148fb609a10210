// The passes of layer_norm(), by layout.
#pragma once

#include <cuda_runtime_api.h>

#include "fusedconv/groupnorm.hpp"

namespace fusedconv::layernorm {

void layer_norm_channels_first(GroupNormProblem const& problem, GroupNormTensors const& tensors,
                               cudaStream_t stream);
void layer_norm_channels_last(GroupNormProblem const& problem, GroupNormTensors const& tensors,
                              cudaStream_t stream);

}  // namespace fusedconv::layernorm
