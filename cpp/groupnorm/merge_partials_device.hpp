// Partial moments of a sample's group to its statistics, by a block each, however they lie.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

#include "cuda/async.hpp"
#include "cuda/cluster.hpp"
#include "cuda/forms_clusters.hpp"
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
// Of a cluster that merges more than those together.
inline constexpr int kMergeBlocks = 8;

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

// Of some parts, about a reference, in two passes over them: few operations of each, and a short
// chain of them.
template <int kCount>
__device__ __forceinline__ device::RelativeMoments merged_parts(Partial const (&parts)[kCount],
                                                                float reference) {
  device::RelativeMoments total;
  float offsets[kCount];
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    bool const any = parts[j].count > 0.0f;  // else its mean says nothing
    offsets[j] = any ? device::Moments::of(parts[j]).about(reference).offset : 0.0f;
    total.count += parts[j].count;
    sum = fmaf(parts[j].count, offsets[j], sum);
  }
  if (total.count == 0.0f) return total;
  total.offset = __fdividef(sum, total.count);
  // What the approximate quotient leaves of the sum.
  float rest = 0.0f;
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    if (parts[j].count == 0.0f) continue;
    float const delta = offsets[j] - total.offset;
    rest = fmaf(parts[j].count, delta, rest);
    total.m2 += fmaf(delta * delta, parts[j].count, parts[j].m2);
  }
  float const correction = __fdividef(rest, total.count);
  total.offset += correction;
  total.m2 = fmaf(-rest, correction, total.m2);
  return total;
}

// The share of thread `thread` of kThreads in a sample's group, counted over the batch, in an order
// that the problem of one sample decides. parts(sample, slot, channel) gives a Partial. A thread
// merges every kThreads-th of the group's channels in all slots, about the mean of its first, with
// kAhead loads in flight: each may take as long as all merges. kTogether: it merges these in two
// passes, about both parts of that mean, as either may hold most; else one after the other.
template <int kThreads, int kAhead, bool kTogether, class Parts>
__device__ __forceinline__ device::Moments merged_by_thread(MergeParams const& p,
                                                            Parts const& parts, int sample_group,
                                                            int thread) {
  int const sample = sample_group / p.groups;
  int const first = sample_group % p.groups * p.channels_per_group;
  int const slot_step = kThreads / p.channels_per_group;
  int const channel_step = kThreads % p.channels_per_group;
  int slot = thread / p.channels_per_group;
  int channel = thread % p.channels_per_group;
  float reference = 0.0f;
  device::RelativeMoments running;
  // Not signed: a thread counts beyond by what it has under way.
  for (unsigned i = unsigned(thread); i < unsigned(p.count);) {
    Partial loaded[kAhead] = {};
#pragma unroll
    for (int j = 0; j < kAhead; ++j, i += kThreads) {
      if (i < unsigned(p.count)) loaded[j] = parts(sample, slot, first + channel);
      slot += slot_step;
      channel += channel_step;
      if (channel >= p.channels_per_group) {
        channel -= p.channels_per_group;
        ++slot;
      }
    }
    if constexpr (kTogether) {
      if (running.count == 0.0f) {
#pragma unroll
        for (int j = kAhead - 1; j >= 0; --j) {
          if (loaded[j].count > 0.0f) reference = loaded[j].mean + loaded[j].low;
        }
      }
      running.merge(merged_parts(loaded, reference));
    } else {
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        auto const part = device::Moments::of(loaded[j]);
        if (running.count == 0.0f && part.count > 0.0f) reference = part.mean;
        running.merge(part.about(reference));
      }
    }
  }
  return device::Moments::of(reference, running);
}

// Of a sample's group, by a block; valid in thread 0.
template <int kThreads, class Parts>
__device__ __forceinline__ Statistics merged_statistics(MergeParams const& p, Parts const& parts,
                                                        int sample_group) {
  constexpr int kAhead = kThreads == kMostMergeThreads ? 4 : 8;
  auto const own =
      merged_by_thread<kThreads, kAhead, false>(p, parts, sample_group, int(threadIdx.x));
  return device::statistics_of(device::merge_block<kThreads>(own), p.eps);
}

// One block per sample and group.
template <int kThreads, class Parts>
__global__ void __launch_bounds__(kThreads)
    merge_partials_kernel(MergeParams const p, Parts const parts, StatisticsTargets const targets) {
  Statistics const statistics = merged_statistics<kThreads>(p, parts, int(blockIdx.x));
  if (threadIdx.x == 0) device::store(targets, blockIdx.x, statistics);
}

// One cluster for each kGroups neighbouring groups of a sample. A block alone would have a
// multiprocessor's share of what the caches and memory give in a time, and few groups leave most
// multiprocessors idle. Groups of one channel are merged four together, for whole sectors.
template <int kThreads, int kGroups, int kAhead, class Parts>
__global__ void __launch_bounds__(kThreads)
    clusters_merge_partials_kernel(MergeParams const p, Parts const parts,
                                   StatisticsTargets const targets) {
#if __CUDA_ARCH__ >= 900
  constexpr int kWarps = kThreads / 32;
  constexpr int kLanes = 32 / kGroups;  // of a warp, of each group
  static_assert(kGroups * kMergeBlocks <= 32 && kGroups <= kWarps, "a warp merges blocks");
  __shared__ device::Moments of_warps[kGroups][kWarps];
  __shared__ alignas(16) device::Moments of_block[kGroups];
  static_assert(sizeof(device::Moments) == sizeof(float4));
  int const rank = int(device::cluster_rank());
  int const first = int(blockIdx.x) / kMergeBlocks * kGroups;
  int const lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  device::Moments part =
      device::merge_warp<kLanes>(merged_by_thread<kMergeBlocks * kWarps * kLanes, kAhead, true>(
          p, parts, first + lane / kLanes, (rank * kWarps + warp) * kLanes + lane % kLanes));
  if (lane % kLanes == 0) of_warps[lane / kLanes][warp] = part;
  __syncthreads();
  if (warp < kGroups) {
    part = device::merge_warp<kWarps>(lane < kWarps ? of_warps[warp][lane] : device::Moments{});
    if (lane == 0) of_block[warp] = part;
  }
  device::arrive_cluster_shared();
  device::wait_cluster();
  if (rank == 0 && warp == 0) {
    int const group = lane / kMergeBlocks;
    part = {};
    if (group < kGroups) {
      float4 const bits = device::load_of_cluster(device::shared_address(&of_block[group]),
                                                  uint32_t(lane % kMergeBlocks));
      part = {bits.x, bits.y, bits.z, bits.w};
    }
    part = device::merge_warp<kMergeBlocks>(part);
    if (lane % kMergeBlocks == 0 && group < kGroups) {
      device::store(targets, first + group, device::statistics_of(part, p.eps));
    }
  }
  // No block's shared memory may go before it is read.
  device::arrive_cluster_relaxed();
  device::wait_cluster();
#else
  __trap();
#endif
}

template <class Parts>
void launch_merge_partials(std::string const& where, GroupNormProblem const& problem, int64_t slots,
                           Parts const& parts, StatisticsTargets const& targets,
                           cudaStream_t stream) {
  MergeParams const p = MergeParams::of(where, problem, slots);
  int64_t const groups = problem.batch * int64_t(problem.groups);
  // Few threads of which each merges some, as there may be many groups.
  auto const launch = [&](auto threads) {
    device::launch(merge_partials_kernel<threads.value, Parts>,
                   device::checked_grid(where.c_str(), groups), threads.value, 0, stream, p, parts,
                   targets);
  };
  auto const launch_clusters = [&](auto kernel, int threads, int groups_together) {
    device::launch_clusters(
        kernel, kMergeBlocks,
        device::checked_grid(where.c_str(), groups / groups_together * kMergeBlocks), threads, 0,
        stream, p, parts, targets);
  };
  // Clusters of few threads, that all may run at once, with what they merge under way at once as
  // far as registers go; where each merges many, of as many threads as a block has.
  using Few = std::integral_constant<int, kMergeThreads>;
  constexpr int kTogether = 4, kTogetherThreads = 512;
  constexpr auto kFew = &clusters_merge_partials_kernel<Few::value, 1, 6, Parts>;
  if (p.count <= kMostByFewThreads) {
    launch(Few{});
  } else if (!device::forms_clusters<kFew>()) {
    launch(std::integral_constant<int, kMostMergeThreads>{});
  } else if (p.channels_per_group == 1 && p.groups % kTogether == 0) {
    launch_clusters(&clusters_merge_partials_kernel<kTogetherThreads, kTogether, 8, Parts>,
                    kTogetherThreads, kTogether);
  } else if (p.count <= kMergeBlocks * kMostByFewThreads) {
    launch_clusters(kFew, Few::value, 1);
  } else {
    launch_clusters(&clusters_merge_partials_kernel<kMostMergeThreads, 1, 4, Parts>,
                    kMostMergeThreads, 1);
  }
  FUSEDCONV_CUDA(where, cudaGetLastError());
}

}  // namespace fusedconv::groupnorm
