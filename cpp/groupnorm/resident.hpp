// GroupNorm with each element read from memory once: a group stays on chip between its moments and
// its normalisation. For groups that fit one block's registers.
#pragma once

#include <cuda_runtime_api.h>

#include "fusedconv/groupnorm.hpp"
#include "fusedconv/support.hpp"

namespace fusedconv::groupnorm {

// A group in the registers of one block, or of one warp for the smallest.
struct ResidentConfig {
  Support support;
  int threads = 0;  // per group
  int vector = 1;   // elements per access
};

// aligned: input and output addresses are multiples of 16 bytes.
ResidentConfig resident_config(GroupNormProblem const& problem, bool aligned);

// Fills tensors.output, and tensors.mean and tensors.rstd where they are not null. The config must
// be of the same problem, of as many samples or more.
void normalize_resident(ResidentConfig const& config, GroupNormProblem const& problem,
                        GroupNormTensors const& tensors, cudaStream_t stream);

// The part of normalize_resident() that reads channels-last tensors.
void normalize_resident_channels_last(ResidentConfig const& config, GroupNormProblem const& problem,
                                      GroupNormTensors const& tensors, cudaStream_t stream);

}  // namespace fusedconv::groupnorm
