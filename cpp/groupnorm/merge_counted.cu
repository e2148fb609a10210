#include "groupnorm/merge_counted.hpp"

#include "cuda/tile.hpp"
#include "fusedconv/check.hpp"
#include "groupnorm/moments.hpp"

namespace fusedconv::groupnorm {
namespace {

constexpr int kThreads = 256;

struct MergeParams {
  int64_t slots, channels;
  int count, groups, channels_per_group;
  float eps;
};

// One block per sample and group.
__global__ void __launch_bounds__(kThreads)
    merge_kernel(MergeParams const p, CountedPartial const* __restrict__ partials,
                 StatisticsTargets targets) {
  int const sample = int(blockIdx.x) / p.groups;
  int const first = int(blockIdx.x) % p.groups * p.channels_per_group;
  device::Moments running;
  for (int i = threadIdx.x; i < p.count; i += kThreads) {
    int const slot = i / p.channels_per_group, channel = i % p.channels_per_group;
    CountedPartial const part = partials[(sample * p.slots + slot) * p.channels + first + channel];
    running.merge(device::Moments::of(part.count, part.moments));
  }
  device::Moments const total = device::merge_block<kThreads>(running);
  if (threadIdx.x == 0) device::store(targets, blockIdx.x, device::statistics_of(total, p.eps));
}

}  // namespace

void merge_counted(char const* where, GroupNormProblem const& problem, int64_t slots,
                   CountedPartial const* partials, StatisticsTargets const& targets,
                   cudaStream_t stream) {
  int64_t const parts = slots * problem.channels_per_group();
  constexpr int64_t kMost = 0x7fffffff - kThreads;
  FUSEDCONV_CHECK(parts <= kMost, where, ": slots x channels of a group: got ", parts,
                  ", expected at most ", kMost);
  MergeParams const p{.slots = slots,
                      .channels = problem.channels,
                      .count = int(parts),
                      .groups = int(problem.groups),
                      .channels_per_group = int(problem.channels_per_group()),
                      .eps = float(problem.eps)};
  dim3 const grid = device::checked_grid(where, problem.batch * int64_t(problem.groups));
  merge_kernel<<<grid, kThreads, 0, stream>>>(p, partials, targets);
  FUSEDCONV_CUDA(where, cudaGetLastError());
}

}  // namespace fusedconv::groupnorm
