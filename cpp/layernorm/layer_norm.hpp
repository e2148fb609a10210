// LayerNorm over the channels of each pixel on the GPU, in one pass.
#pragma once

#include <cuda_runtime_api.h>

#include "fusedconv/groupnorm.hpp"

namespace fusedconv::layernorm {

// Throws InvalidArgument where layer_norm() does not serve the problem: output and input differ in
// layout, or the output's dtype is neither the input's nor float32, or rows are padded.
void check(GroupNormProblem const& problem);

// What GroupNormProblem describes, but that mean and biased variance run over the channels of one
// sample and pixel; groups say nothing, tensors.mean and tensors.rstd are not filled. The output
// may be the input where the dtypes are equal.
void layer_norm(GroupNormProblem const& problem, GroupNormTensors const& tensors,
                cudaStream_t stream);

}  // namespace fusedconv::layernorm
