// The passes around the convolution: they pack its filter and merge its partial moments.
#pragma once

#include <cuda_runtime_api.h>

#include "conv/phase_planes.hpp"
#include "conv/problem.hpp"
#include "conv/sm90/runs/rows.hpp"
#include "fusedconv/groupnorm.hpp"
#include "groupnorm/statistics.hpp"

namespace fusedconv::conv::sm90::runs {

// To the order in which stages consume it: taps reversed, channel axes swapped, rounded. The
// counters behind it become zero.
void pack_filter(Config const& config, FilterSource const& source, void const* weight, void* filter,
                 cudaStream_t stream);

// The same for the input's gradient of a strided transposed convolution, which is the convolution
// of its output gradient's phase planes; source: its weight, channel axes swapped.
void pack_phases(Config const& config, FilterSource const& source, PhasePlanes const& planes,
                 void const* weight, void* filter, cudaStream_t stream);

struct NormalizeTensors {
  void const* input = nullptr;  // the convolution's output
  void* output = nullptr;       // or the input
  void const* weight = nullptr;
  void const* bias = nullptr;
  TilePartial const* partials = nullptr;
  float* mean = nullptr;  // [N, groups], or null; and so is rstd
  float* rstd = nullptr;
};

// Whether normalize_merging() takes less time than merge_moments() and a pass behind it: partial
// moments are few, and blocks no more than run at once.
bool merges_in_passing(Config const& config, GroupNormProblem const& problem);

// Channels first to channels first: each block merges its group's partial moments, as
// merge_moments() does, and normalises its part of a plane.
void normalize_merging(Config const& config, GroupNormProblem const& problem,
                       NormalizeTensors const& tensors, cudaStream_t stream);

// Partial moments to statistics [N, groups], merged in a fixed order.
void merge_moments(Config const& config, GroupNormProblem const& problem,
                   TilePartial const* partials, groupnorm::StatisticsTargets const& targets,
                   cudaStream_t stream);

}  // namespace fusedconv::conv::sm90::runs
