// The pass behind the kernel.
#pragma once

#include <cuda_runtime_api.h>

#include "conv/phase_planes.hpp"
#include "conv/sm90/wgrad/rows.hpp"

namespace fusedconv::conv::sm90::wgrad {

// Adds each task's partial sums in a fixed order. grad_weight is of the problem's dtype and lies as
// `weight` says, whose extents are those of the weight whose phases' planes the problem's output
// channels are.
void add_partials(Config const& config, PhasePlanes const& phases, FilterSource const& weight,
                  float const* partials, void* grad_weight, cudaStream_t stream);

}  // namespace fusedconv::conv::sm90::wgrad
