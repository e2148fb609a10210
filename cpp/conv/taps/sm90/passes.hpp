// The pass in front of the convolution: it packs the filter.
#pragma once

#include <cuda_runtime_api.h>

#include "conv/problem.hpp"
#include "conv/taps/sm90/rows.hpp"

namespace fusedconv::conv::taps::sm90 {

// A weight [C, K, T, R, S], with K those of one convolution group, to the blocks that consumers
// take, in their order. Rows and channels that are not there are zeros.
void pack_filter(Config const& config, FilterSource const& source, void const* weight, void* filter,
                 cudaStream_t stream);

}  // namespace fusedconv::conv::taps::sm90
