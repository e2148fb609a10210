// The passes of gradient(), by layout and kind, and in how many parts each leaves its sums.
#pragma once

#include <cuda_runtime_api.h>

#include "ungrouped/gradient.hpp"

namespace fusedconv::ungrouped {

// Channels last, of every kind.
inline constexpr int kMostRowChannels = 1024;  // of a pixel that is normalised
int64_t parts_of_rows(GroupNormProblem const& problem, Kind kind);
void gradient_of_rows(GradientConfig const& config, GradientTensors const& tensors,
                      cudaStream_t stream);

// Channels first, an affine map or the identity.
int64_t parts_of_planes(GroupNormProblem const& problem);
void gradient_of_planes(GradientConfig const& config, GradientTensors const& tensors,
                        cudaStream_t stream);

// Channels first, LayerNorm.
inline constexpr int kMostColumnChannels = 1024;
int64_t parts_of_columns(GroupNormProblem const& problem);
void gradient_of_columns(GradientConfig const& config, GradientTensors const& tensors,
                         cudaStream_t stream);

}  // namespace fusedconv::ungrouped
