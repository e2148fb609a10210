// Partial moments that a convolution left by tile and channel, to statistics by sample and group.
#pragma once

#include <cstdint>

#include "cuda/tile.hpp"
#include "cutlass/fast_math.h"
#include "fusedconv/check.hpp"
#include "fusedconv/groupnorm.hpp"
#include "groupnorm/moments.hpp"

namespace fusedconv::conv::sm90 {

inline constexpr int kMergeThreads = 256;

struct MergeParams {
  cutlass::FastDivmod channels_per_group;
  int tiles, channels, groups;
  float eps;
};

// One block per sample and group merges its tiles' channels. pixels(tile): of a sample's tile.
template <class Pixels>
__global__ void __launch_bounds__(kMergeThreads)
    merge_moments_kernel(MergeParams const p, Pixels const pixels,
                         groupnorm::Partial const* __restrict__ partials,
                         groupnorm::StatisticsTargets targets) {
  int const sample = int(blockIdx.x) / p.groups;
  int const first = int(blockIdx.x) % p.groups * p.channels_per_group.divisor;
  int const count = p.tiles * p.channels_per_group.divisor;
  device::Moments running;
  for (int i = threadIdx.x; i < count; i += kMergeThreads) {
    int tile, channel;
    p.channels_per_group(tile, channel, i);
    groupnorm::Partial const partial =
        partials[(int64_t(sample) * p.tiles + tile) * p.channels + first + channel];
    running.merge(device::Moments::of(float(pixels(tile)), partial));
  }
  device::Moments const total = device::merge_block<kMergeThreads>(running);
  if (threadIdx.x == 0) {
    device::store(targets, blockIdx.x, device::statistics_of(total, p.eps));
  }
}

// Of problem.batch samples with so many tiles each.
template <class Pixels>
void launch_merge_moments(GroupNormProblem const& problem, int tiles, Pixels const& pixels,
                          groupnorm::Partial const* partials,
                          groupnorm::StatisticsTargets const& targets, cudaStream_t stream) {
  int64_t const parts = tiles * problem.channels_per_group();
  FUSEDCONV_CHECK(parts <= 0x7fffffff - kMergeThreads,
                  "sm90 merge_moments: tiles x channels of a group: got ", parts,
                  ", expected at most ", 0x7fffffff - kMergeThreads);
  MergeParams const p{.channels_per_group = cutlass::FastDivmod(int(problem.channels_per_group())),
                      .tiles = tiles,
                      .channels = int(problem.channels),
                      .groups = int(problem.groups),
                      .eps = float(problem.eps)};
  dim3 const grid =
      device::checked_grid("sm90 merge_moments", problem.batch * int64_t(problem.groups));
  merge_moments_kernel<<<grid, kMergeThreads, 0, stream>>>(p, pixels, partials, targets);
  FUSEDCONV_CUDA("sm90 merge_moments", cudaGetLastError());
}

}  // namespace fusedconv::conv::sm90
