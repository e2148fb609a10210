// Partial moments that a convolution left by tile and channel, to statistics by sample and group.
#pragma once

#include <cstdint>

#include "cuda/launch.hpp"
#include "cuda/tile.hpp"
#include "cutlass/fast_math.h"
#include "fusedconv/check.hpp"
#include "fusedconv/groupnorm.hpp"
#include "groupnorm/merge_parts.hpp"
#include "groupnorm/moments.hpp"

namespace fusedconv::conv::sm90 {

inline constexpr int kMergeThreads = 256;
// Of a group's partial moments, so many the pass behind may merge in each of its blocks.
inline constexpr int kMostMergedInPassing = 4 * kMergeThreads;

struct MergeParams {
  cutlass::FastDivmod channels_per_group;
  int tiles, channels, groups;
  float eps;

  // Of samples with so many tiles each.
  static MergeParams of(GroupNormProblem const& problem, int tiles) {
    int64_t const parts = tiles * problem.channels_per_group();
    FUSEDCONV_CHECK(parts <= 0x7fffffff - kMergeThreads,
                    "sm90 merge_moments: tiles x channels of a group: got ", parts,
                    ", expected at most ", 0x7fffffff - kMergeThreads);
    return {.channels_per_group = cutlass::FastDivmod(int(problem.channels_per_group())),
            .tiles = tiles,
            .channels = int(problem.channels),
            .groups = int(problem.groups),
            .eps = float(problem.eps)};
  }
};

// Of a sample's group, counted over the batch, in an order that only the problem decides, by a
// block of kMergeThreads; valid in thread 0. pixels(tile): of a sample's tile.
template <class Pixels>
__device__ __forceinline__ groupnorm::Statistics merged_statistics(
    MergeParams const& p, Pixels const& pixels, groupnorm::Partial const* __restrict__ partials,
    int sample_group) {
  int const sample = sample_group / p.groups;
  int const first = sample_group % p.groups * p.channels_per_group.divisor;
  int const count = p.tiles * p.channels_per_group.divisor;
  device::Moments running;
  for (int i = threadIdx.x; i < count; i += kMergeThreads) {
    int tile, channel;
    p.channels_per_group(tile, channel, i);
    groupnorm::Partial const partial =
        partials[(int64_t(sample) * p.tiles + tile) * p.channels + first + channel];
    running.merge(device::Moments::of(float(pixels(tile)), partial));
  }
  return device::statistics_of(device::merge_block<kMergeThreads>(running), p.eps);
}

// One block per sample and group.
template <class Pixels>
__global__ void __launch_bounds__(kMergeThreads)
    merge_moments_kernel(MergeParams const p, Pixels const pixels,
                         groupnorm::Partial const* __restrict__ partials,
                         groupnorm::StatisticsTargets targets) {
  auto const statistics = merged_statistics(p, pixels, partials, int(blockIdx.x));
  if (threadIdx.x == 0) device::store(targets, blockIdx.x, statistics);
}

// A tile's partial moments, with its pixels for their count.
template <class Pixels>
struct TileParts {
  groupnorm::Partial const* __restrict__ partials;
  Pixels pixels;
  int tiles, channels;

  __device__ __forceinline__ groupnorm::CountedPartial operator()(int64_t sample, int tile,
                                                                  int channel) const {
    return {float(pixels(tile)), partials[(sample * tiles + tile) * channels + channel]};
  }
};

// Of problem.batch samples with so many tiles each.
template <class Pixels>
void launch_merge_moments(GroupNormProblem const& problem, int tiles, Pixels const& pixels,
                          groupnorm::Partial const* partials,
                          groupnorm::StatisticsTargets const& targets, cudaStream_t stream) {
  constexpr char const* kWhere = "sm90 merge_moments";
  if (tiles * problem.channels_per_group() > kMostMergedInPassing) {
    return groupnorm::merge_parts(kWhere, problem, tiles,
                                  TileParts<Pixels>{partials, pixels, tiles, int(problem.channels)},
                                  targets, stream);
  }
  // As the pass behind does for smaller batches: a sample has the same bits in any.
  dim3 const grid = device::checked_grid(kWhere, problem.batch * int64_t(problem.groups));
  FUSEDCONV_CUDA(kWhere,
                 device::launch(&merge_moments_kernel<Pixels>, grid, kMergeThreads, 0, stream,
                                MergeParams::of(problem, tiles), pixels, partials, targets));
}

}  // namespace fusedconv::conv::sm90
