// The pass in front of the convolution: it packs the filter.
#pragma once

#include <cuda_runtime_api.h>

#include "conv/problem.hpp"
#include "conv/sm90/boxes/rows.hpp"

namespace fusedconv::conv::sm90::boxes {

// A weight [C, K, T, R, S] to the blocks that steps consume, in their order, each as a swizzled
// copy would leave it. Channels that are not there are zeros; columns of no phase are left as they
// are.
void pack_filter(Config const& config, FilterSource const& source, void const* weight, void* filter,
                 cudaStream_t stream);

}  // namespace fusedconv::conv::sm90::boxes
