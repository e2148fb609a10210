// What convolutions left of moments, by part of a sample and channel, to statistics.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fusedconv/groupnorm.hpp"
#include "groupnorm/statistics.hpp"

namespace fusedconv::groupnorm {

// partials [N, slots, channels], to targets [N, groups], merged in a fixed order. where: who asks,
// for errors.
void merge_counted(char const* where, GroupNormProblem const& problem, int64_t slots,
                   CountedPartial const* partials, StatisticsTargets const& targets,
                   cudaStream_t stream);

}  // namespace fusedconv::groupnorm
