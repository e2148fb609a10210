// GroupNorm with each element read from DRAM once, for groups that only all multiprocessors
// together can hold.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "groupnorm/groupnorm.hpp"
#include "groupnorm/stream.hpp"

namespace fusedconv::groupnorm {

// device must be current; -1 stands for a device that is not there.
StreamPlan plan_streamed(Passes const& passes, int64_t batch, bool aligned, int device);

int64_t streamed_workspace_bytes(StreamPlan const& plan);

// Fills tensors.output, and tensors.mean and tensors.rstd where they are not null. The plan must
// come from plan_streamed() for the same arguments. A cooperative launch: every block must be
// resident.
void normalize_streamed(StreamPlan const& plan, Passes const& passes,
                        GroupNormTensors const& tensors, void* workspace, cudaStream_t stream);

}  // namespace fusedconv::groupnorm
