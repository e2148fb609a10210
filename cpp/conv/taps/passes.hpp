// The pass in front of the convolution: it packs the filter.
#pragma once

#include <cuda_runtime_api.h>

#include "conv/problem.hpp"
#include "conv/taps/rows.hpp"

namespace fusedconv::conv::taps {

// A weight [C, K, T, R, S], with K those of one convolution group, to the order in which steps
// consume it. Rows and channels that are not there are zeros.
void pack_filter(Config const& config, FilterSource const& source, void const* weight, void* filter,
                 cudaStream_t stream);

}  // namespace fusedconv::conv::taps
