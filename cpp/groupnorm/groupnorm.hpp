// GroupNorm on the GPU in two passes: moments, then normalisation.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fusedconv/groupnorm.hpp"

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

// Fills tensors.mean and tensors.rstd [batch, groups] from tensors.input. Deterministic: partial
// moments are merged in a fixed order.
void moments(Passes const& passes, GroupNormTensors const& tensors, void* workspace,
             cudaStream_t stream);

// Fills tensors.output from input, mean, rstd, weight and bias. Channels-first to channels-first,
// channels-last to either layout. Null mean and rstd mean no normalisation: only the activations
// and the change of layout and type.
void normalize(Passes const& passes, GroupNormTensors const& tensors, cudaStream_t stream);

}  // namespace fusedconv::groupnorm
