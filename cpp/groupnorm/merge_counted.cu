#include "groupnorm/merge_counted.hpp"

#include <type_traits>

#include "cuda/launch.hpp"
#include "cuda/tile.hpp"
#include "fusedconv/check.hpp"
#include "groupnorm/moments.hpp"

namespace fusedconv::groupnorm {
namespace {

constexpr int kMostThreads = 1024;
static_assert(kMostPartials <= 0x7fffffff - 8 * int64_t(kMostThreads), "counted in 32 bits");
// Loads of a thread in flight: each may take as long as all merges.
template <int kThreads>
constexpr int kAhead = kThreads == kMostThreads ? 4 : 8;

struct MergeParams {
  int64_t slots, channels;
  int count, groups, channels_per_group;
  float eps;
};

// One block per sample and group. A thread merges every kThreads-th partial, about the mean of its
// first.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    merge_kernel(MergeParams const p, CountedPartial const* __restrict__ partials,
                 StatisticsTargets targets) {
  int const sample = int(blockIdx.x) / p.groups;
  int const first = int(blockIdx.x) % p.groups * p.channels_per_group;
  CountedPartial const* const source = partials + sample * p.slots * p.channels + first;
  int const slot_step = kThreads / p.channels_per_group;
  int const channel_step = kThreads % p.channels_per_group;
  int slot = int(threadIdx.x) / p.channels_per_group;
  int channel = int(threadIdx.x) % p.channels_per_group;
  float reference = 0.0f;
  device::RelativeMoments running;
  for (int i = int(threadIdx.x); i < p.count;) {
    CountedPartial parts[kAhead<kThreads>] = {};
#pragma unroll
    for (int j = 0; j < kAhead<kThreads>; ++j, i += kThreads) {
      if (i < p.count) parts[j] = source[slot * p.channels + channel];
      slot += slot_step;
      channel += channel_step;
      if (channel >= p.channels_per_group) {
        channel -= p.channels_per_group;
        ++slot;
      }
    }
#pragma unroll
    for (int j = 0; j < kAhead<kThreads>; ++j) {
      auto const part = device::Moments::of(parts[j].count, parts[j].moments);
      if (running.count == 0.0f && part.count > 0.0f) reference = part.mean;
      running.merge(part.about(reference));
    }
  }
  device::Moments const total =
      device::merge_block<kThreads>(device::Moments::of(reference, running));
  if (threadIdx.x == 0) device::store(targets, blockIdx.x, device::statistics_of(total, p.eps));
}

}  // namespace

void merge_counted(char const* where, GroupNormProblem const& problem, int64_t slots,
                   CountedPartial const* partials, StatisticsTargets const& targets,
                   cudaStream_t stream) {
  int64_t const parts = slots * problem.channels_per_group();
  FUSEDCONV_CHECK(parts <= kMostPartials, where, ": slots x channels of a group: got ", parts,
                  ", expected at most ", kMostPartials);
  MergeParams const p{.slots = slots,
                      .channels = problem.channels,
                      .count = int(parts),
                      .groups = int(problem.groups),
                      .channels_per_group = int(problem.channels_per_group()),
                      .eps = float(problem.eps)};
  dim3 const grid = device::checked_grid(where, problem.batch * int64_t(problem.groups));
  // Few threads of which each merges some, as there may be many groups; by what is the same for any
  // number of samples, so that the bits of a result do not depend on how a batch is cut.
  constexpr int kEach = 16;
  auto const launch = [&](auto threads) {
    device::launch(merge_kernel<threads.value>, grid, threads.value, 0, stream, p, partials,
                   targets);
  };
  if (parts <= 128 * kEach) {
    launch(std::integral_constant<int, 128>{});
  } else if (parts <= 256 * kEach) {
    launch(std::integral_constant<int, 256>{});
  } else {
    launch(std::integral_constant<int, kMostThreads>{});
  }
  FUSEDCONV_CUDA(where, cudaGetLastError());
}

}  // namespace fusedconv::groupnorm
