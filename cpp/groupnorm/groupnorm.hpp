// GroupNorm on the GPU in two passes: moments, then normalisation.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fusedconv/groupnorm.hpp"
#include "groupnorm/statistics.hpp"

namespace fusedconv::groupnorm {

// What the passes need beyond the problem itself: how wide a channels-last row of the input is, and
// what the normalising pass writes.
struct Passes {
  GroupNormProblem problem;
  int64_t row_channels = 0;  // >= channels; a channels-last input may carry padding channels
  Layout output_layout = Layout::kChannelsFirst;
  DType output_dtype = DType::kFloat32;
};

// Bytes of scratch that moments() needs for `samples` samples.
int64_t moments_workspace_bytes(Passes const& passes, int64_t samples);

// Fills the targets, [batch, groups] each, from the input. Deterministic: partial moments are
// merged in a fixed order.
void moments(Passes const& passes, void const* input, StatisticsTargets const& targets,
             void* workspace, cudaStream_t stream);

// Fills tensors.output from input, weight, bias and what moments() found. Channels-first to
// channels-first, channels-last to either layout. Null statistics mean no normalisation: only the
// activations and the change of layout and type.
void normalize(Passes const& passes, GroupNormTensors const& tensors, Statistics const* statistics,
               cudaStream_t stream);

}  // namespace fusedconv::groupnorm
