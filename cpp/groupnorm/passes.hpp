// GroupNorm on the GPU in two passes: moments, then normalisation.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fusedconv/groupnorm.hpp"
#include "groupnorm/statistics.hpp"

namespace fusedconv::groupnorm {

// Bytes of workspace that moments() needs for `samples` samples.
int64_t moments_workspace_bytes(GroupNormProblem const& problem, int64_t samples);

// Fills the targets, [batch, groups] each, from the input. Deterministic: partial moments are
// merged in a fixed order.
void moments(GroupNormProblem const& problem, void const* input, StatisticsTargets const& targets,
             void* workspace, cudaStream_t stream);

// Fills tensors.output from input, weight, bias and what moments() found. Channels-first to
// channels-first, channels-last to either layout. Null statistics are those of the identity: only
// activations, weight and bias, and the change of layout and dtype.
void normalize(GroupNormProblem const& problem, GroupNormTensors const& tensors,
               Statistics const* statistics, cudaStream_t stream);

}  // namespace fusedconv::groupnorm
