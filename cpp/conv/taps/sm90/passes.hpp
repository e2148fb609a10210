// The passes around the convolution: they pack its filter and merge its partial moments.
#pragma once

#include <cuda_runtime_api.h>

#include "conv/problem.hpp"
#include "conv/taps/sm90/rows.hpp"
#include "fusedconv/groupnorm.hpp"
#include "groupnorm/merge_counted.hpp"

namespace fusedconv::conv::taps::sm90 {

// A weight [C, K, T, R, S], with K those of one convolution group, to the blocks that consumers
// take, in their order. Rows and channels that are not there are zeros.
void pack_filter(Config const& config, FilterSource const& source, void const* weight, void* filter,
                 cudaStream_t stream);

inline void merge_moments(Config const& config, GroupNormProblem const& problem,
                          CountedPartial const* partials,
                          groupnorm::StatisticsTargets const& targets, cudaStream_t stream) {
  groupnorm::merge_counted("taps merge_moments", problem, config.partial_slots(), partials, targets,
                           stream);
}

}  // namespace fusedconv::conv::taps::sm90
