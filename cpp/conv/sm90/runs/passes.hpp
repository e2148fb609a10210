// The passes around the convolution: they pack its filter and merge its partial moments.
#pragma once

#include <cuda_runtime_api.h>

#include "conv/problem.hpp"
#include "conv/sm90/runs/rows.hpp"
#include "fusedconv/groupnorm.hpp"
#include "groupnorm/statistics.hpp"

namespace fusedconv::conv::sm90::runs {

// To the order in which stages consume it: taps reversed, channel axes swapped, rounded. The
// counters behind it become zero.
void pack_filter(Config const& config, FilterSource const& source, void const* weight, void* filter,
                 cudaStream_t stream);

// Partial moments to statistics [N, groups], merged in a fixed order.
void merge_moments(Config const& config, GroupNormProblem const& problem,
                   groupnorm::Partial const* partials, groupnorm::StatisticsTargets const& targets,
                   cudaStream_t stream);

}  // namespace fusedconv::conv::sm90::runs
