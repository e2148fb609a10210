// Parts of a sample's moments to statistics by group: the kernel, and what decides its threads.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/launch.hpp"
#include "cuda/tile.hpp"
#include "fusedconv/check.hpp"
#include "fusedconv/groupnorm.hpp"
#include "groupnorm/moments.hpp"
#include "groupnorm/statistics.hpp"

namespace fusedconv::groupnorm {

inline constexpr int kMostMergeThreads = 1024;
static_assert(kMostPartials <= 0x7fffffff - 8 * int64_t(kMostMergeThreads), "counted in 32 bits");
// Loads of a thread in flight: each may take as long as all merges.
template <int kThreads>
constexpr int kMergesAhead = kThreads == kMostMergeThreads ? 4 : 8;

struct MergePartsParams {
  int count, groups, channels_per_group;
  float eps;
};

// One block per sample and group, which merges parts(sample, slot, channel) of the group's channels
// in all slots. A thread merges every kThreads-th, about the mean of its first.
template <int kThreads, class Parts>
__global__ void __launch_bounds__(kThreads)
    merge_parts_kernel(MergePartsParams const p, Parts const parts, StatisticsTargets targets) {
  constexpr int kAhead = kMergesAhead<kThreads>;
  int const sample = int(blockIdx.x) / p.groups;
  int const first = int(blockIdx.x) % p.groups * p.channels_per_group;
  int const slot_step = kThreads / p.channels_per_group;
  int const channel_step = kThreads % p.channels_per_group;
  int slot = int(threadIdx.x) / p.channels_per_group;
  int channel = int(threadIdx.x) % p.channels_per_group;
  float reference = 0.0f;
  device::RelativeMoments running;
  for (int i = int(threadIdx.x); i < p.count;) {
    CountedPartial loaded[kAhead] = {};
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
      auto const part = device::Moments::of(loaded[j].count, loaded[j].moments);
      if (running.count == 0.0f && part.count > 0.0f) reference = part.mean;
      running.merge(part.about(reference));
    }
  }
  device::Moments const total =
      device::merge_block<kThreads>(device::Moments::of(reference, running));
  if (threadIdx.x == 0) device::store(targets, blockIdx.x, device::statistics_of(total, p.eps));
}

// Merges in a fixed order, to targets [N, groups]. where: who asks, for errors.
template <class Parts>
void merge_parts(char const* where, GroupNormProblem const& problem, int64_t slots,
                 Parts const& parts, StatisticsTargets const& targets, cudaStream_t stream) {
  int64_t const count = slots * problem.channels_per_group();
  FUSEDCONV_CHECK(count <= kMostPartials, where, ": slots x channels of a group: got ", count,
                  ", expected at most ", kMostPartials);
  MergePartsParams const p{.count = int(count),
                           .groups = int(problem.groups),
                           .channels_per_group = int(problem.channels_per_group()),
                           .eps = float(problem.eps)};
  dim3 const grid = device::checked_grid(where, problem.batch * int64_t(problem.groups));
  // Few threads of which each merges some, as there may be many groups; by what is the same for any
  // number of samples, so that the bits of a result do not depend on how a batch is cut.
  constexpr int kEach = 16;
  auto const launch = [&](auto threads) {
    device::launch(merge_parts_kernel<threads.value, Parts>, grid, threads.value, 0, stream, p,
                   parts, targets);
  };
  if (count <= 128 * kEach) {
    launch(std::integral_constant<int, 128>{});
  } else if (count <= 256 * kEach) {
    launch(std::integral_constant<int, 256>{});
  } else {
    launch(std::integral_constant<int, kMostMergeThreads>{});
  }
  FUSEDCONV_CUDA(where, cudaGetLastError());
}

}  // namespace fusedconv::groupnorm
