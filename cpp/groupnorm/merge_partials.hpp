// Partial moments, by part of a sample and channel, to statistics.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "fusedconv/groupnorm.hpp"
#include "groupnorm/statistics.hpp"

namespace fusedconv::groupnorm {

// [N, slots, row_channels], of which the first channels are a problem's.
struct Partials {
  Partial const* base;
  int64_t slots, row_channels;
};

// To targets [N, groups], merged in an order that the problem of one sample decides. where: who
// asks, for errors.
void merge_partials(std::string const& where, GroupNormProblem const& problem,
                    Partials const& partials, StatisticsTargets const& targets,
                    cudaStream_t stream);

}  // namespace fusedconv::groupnorm
