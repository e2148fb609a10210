// GroupNorm with each element read from memory once: a group stays on chip between its moments and
// its normalisation. For groups that fit one block's registers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "groupnorm/groupnorm.hpp"

namespace fusedconv::groupnorm {

// A group in the registers of one block, or of one warp for the smallest.
struct ResidentPlan {
  std::string obstacle;  // why the kernel does not serve the problem; empty where it does
  int threads = 0;       // per group
  int vector = 1;        // elements per access
  int64_t units = 0;     // groups of all samples
};

// aligned: input and output addresses are multiples of 16 bytes.
ResidentPlan plan_resident(Passes const& passes, int64_t batch, bool aligned);

// Fills tensors.output, and tensors.mean and tensors.rstd where they are not null. The plan must
// come from plan_resident() for the same arguments.
void normalize_resident(ResidentPlan const& plan, Passes const& passes,
                        GroupNormTensors const& tensors, cudaStream_t stream);

// The part of normalize_resident() that reads channels-last tensors.
void normalize_resident_channels_last(ResidentPlan const& plan, Passes const& passes,
                                      GroupNormTensors const& tensors, cudaStream_t stream);

}  // namespace fusedconv::groupnorm
