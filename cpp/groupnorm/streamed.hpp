// GroupNorm with each element read from DRAM once, for groups that only all multiprocessors
// together can hold.
#pragma once

#include <cuda_runtime_api.h>

#include "fusedconv/device.hpp"
#include "fusedconv/groupnorm.hpp"
#include "groupnorm/stream.hpp"

namespace fusedconv::groupnorm {

// aligned: input and output addresses are multiples of 16 bytes. saves: gradients follow, which
// compute what is normalised once more and must find the mean to be of the same values.
StreamedConfig streamed_config(GroupNormProblem const& problem, bool aligned, Device const& device,
                               bool saves);

// Fills tensors.output, and tensors.mean and tensors.rstd where they are not null. The config must
// be of the same problem and of the device that runs it. workspace: config.words_bytes(). A
// cooperative launch: every block must be resident.
void normalize_streamed(StreamedConfig const& config, GroupNormProblem const& problem,
                        GroupNormTensors const& tensors, void* workspace, cudaStream_t stream);

}  // namespace fusedconv::groupnorm
