// Partial moments of a sample's group to its statistics, by a block each, however they lie.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

#include "cuda/launch.hpp"
#include "cuda/tile.hpp"
#include "fusedconv/check.hpp"
#include "fusedconv/groupnorm.hpp"
#include "groupnorm/moments.hpp"
#include "groupnorm/statistics.hpp"

namespace fusedconv::groupnorm {

inline constexpr int kMergeThreads = 256;
inline constexpr int kMostMergeThreads = 1024;
static_assert(kMostPartials <= 0x7fffffff - 8 * int64_t(kMostMergeThreads), "counted in 32 bits");
// Of a group's partial moments, so many are merged by kMergeThreads whoever does it, so that a
// sample has the same bits in any batch.
inline constexpr int64_t kMostByFewThreads = 24 * kMergeThreads;

struct MergeParams {
  int count;  // of a group
  int groups, channels_per_group;
  float eps;

  static MergeParams of(std::string const& where, GroupNormProblem const& problem, int64_t slots) {
    int64_t const count = slots * problem.channels_per_group();
    FUSEDCONV_CHECK(count <= kMostPartials, where,
                    ": partial moments of a group: got slots x channels = ", count,
                    ", expected at most ", kMostPartials);
    return {.count = int(count),
            .groups = int(problem.groups),
            .channels_per_group = int(problem.channels_per_group()),
            .eps = float(problem.eps)};
  }
};

// Of a sample's group, counted over the batch, in an order that the problem of one sample decides;
// valid in thread 0. parts(sample, slot, channel) gives a Partial. A thread merges every
// kThreads-th of the group's channels in all slots, about the mean of its first.
template <int kThreads, class Parts>
__device__ __forceinline__ Statistics merged_statistics(MergeParams const& p, Parts const& parts,
                                                        int sample_group) {
  // Loads of a thread in flight: each may take as long as all merges.
  constexpr int kAhead = kThreads == kMostMergeThreads ? 4 : 8;
  int const sample = sample_group / p.groups;
  int const first = sample_group % p.groups * p.channels_per_group;
  int const slot_step = kThreads / p.channels_per_group;
  int const channel_step = kThreads % p.channels_per_group;
  int slot = int(threadIdx.x) / p.channels_per_group;
  int channel = int(threadIdx.x) % p.channels_per_group;
  float reference = 0.0f;
  device::RelativeMoments running;
  for (int i = int(threadIdx.x); i < p.count;) {
    Partial loaded[kAhead] = {};
#pragma unroll
    for (int j = 0; j < kAhead; ++j, i += kThreads) {
      if (i < p.count) loaded[j] = parts(sample, slot, first + channel);
      slot += slot_step;
      channel += channel_step;
      if (channel >= p.channels_per_group) {
        channel -= p.channels_per_group;
        ++slot;
      }
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      auto const part = device::Moments::of(loaded[j]);
      if (running.count == 0.0f && part.count > 0.0f) reference = part.mean;
      running.merge(part.about(reference));
    }
  }
  return device::statistics_of(
      device::merge_block<kThreads>(device::Moments::of(reference, running)), p.eps);
}

// One block per sample and group.
template <int kThreads, class Parts>
__global__ void __launch_bounds__(kThreads)
    merge_partials_kernel(MergeParams const p, Parts const parts, StatisticsTargets const targets) {
  Statistics const statistics = merged_statistics<kThreads>(p, parts, int(blockIdx.x));
  if (threadIdx.x == 0) device::store(targets, blockIdx.x, statistics);
}

template <class Parts>
void launch_merge_partials(std::string const& where, GroupNormProblem const& problem, int64_t slots,
                           Parts const& parts, StatisticsTargets const& targets,
                           cudaStream_t stream) {
  MergeParams const p = MergeParams::of(where, problem, slots);
  dim3 const grid = device::checked_grid(where.c_str(), problem.batch * int64_t(problem.groups));
  // Few threads of which each merges some, as there may be many groups.
  auto const launch = [&](auto threads) {
    device::launch(merge_partials_kernel<threads.value, Parts>, grid, threads.value, 0, stream, p,
                   parts, targets);
  };
  if (p.count <= kMostByFewThreads) {
    launch(std::integral_constant<int, kMergeThreads>{});
  } else {
    launch(std::integral_constant<int, kMostMergeThreads>{});
  }
  FUSEDCONV_CUDA(where, cudaGetLastError());
}

}  // namespace fusedconv::groupnorm
