// The passes around the convolution: they pack its filter, merge its partial moments and bring its
// output into a tensor's order.
#pragma once

#include <cuda_runtime_api.h>

#include "conv/problem.hpp"
#include "conv/sm90/rows.hpp"
#include "fusedconv/groupnorm.hpp"
#include "groupnorm/statistics.hpp"

namespace fusedconv::conv::sm90 {

// To the order in which stages consume it: taps reversed, channel axes swapped, rounded or split in
// two.
void pack_filter(Config const& config, FilterSource const& source, void const* weight, void* filter,
                 cudaStream_t stream);

// Partial moments to statistics [N, groups], merged in a fixed order.
void merge_moments(Config const& config, GroupNormProblem const& problem,
                   groupnorm::Partial const* partials, groupnorm::StatisticsTargets const& targets,
                   cudaStream_t stream);

struct FinalizeTensors {
  void const* input = nullptr;  // the convolution's output, in the order of its accumulators
  void* output = nullptr;
  void* conv_output = nullptr;  // or null
  void const* weight = nullptr;
  void const* bias = nullptr;
  groupnorm::Statistics const* statistics = nullptr;  // null: no normalisation
};

// The convolution's output to normalised output of a dense layout, and, where conv_output is given,
// to itself in that layout. Channels-last output takes 16-byte stores where rows allow them.
void finalize(Config const& config, GroupNormProblem const& problem, FinalizeTensors const& tensors,
              cudaStream_t stream);

}  // namespace fusedconv::conv::sm90
