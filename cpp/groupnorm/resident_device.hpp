// What the kernels that hold a group in registers have in common.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/math.hpp"
#include "fusedconv/check.hpp"
#include "groupnorm/affine.hpp"
#include "groupnorm/moments.hpp"
#include "groupnorm/resident.hpp"

namespace fusedconv::groupnorm {

// The smallest number of threads whose registers hold a group serves it.
inline constexpr int kGroupThreads[] = {32, 128, 512};
inline constexpr int kThreadPacks = 8;  // vectors of a thread

constexpr int resident_block(int group_threads) {
  return group_threads < 256 ? 256 : group_threads;
}

// On a multiprocessor at a time, of which the registers are bounded: one block of 512 threads alone
// would not keep enough loads under way.
inline constexpr int kResidentThreads = 1024;

// A channel's weight and bias, then its scale and shift.
using TableEntry = float2;

// Of the groups that a block of the channels-last kernel holds.
inline int64_t table_bytes(GroupNormProblem const& p, int group_threads) {
  int64_t const groups = resident_block(group_threads) / group_threads;
  return groups * p.channels_per_group() * int64_t(sizeof(TableEntry));
}

// Calls body with the threads of a group as an integral constant.
template <class F>
void dispatch_group_threads(ResidentConfig const& config, F&& body) {
  switch (config.threads) {
    case 32: return body(std::integral_constant<int, 32>{});
    case 128: return body(std::integral_constant<int, 128>{});
    case 512: return body(std::integral_constant<int, 512>{});
    default: break;
  }
  throw InvalidArgument(detail::join("normalize_resident: ", config.support.reason));
}

namespace device_resident {

using device::Moments;
using device::Pack;

// Moments of the first `count` packs, all activated.
template <class T, int kVector, int kPacks, bool kActivate>
__device__ __forceinline__ Moments moments_of_packs(Pack<T, kVector> (&packs)[kPacks], int count,
                                                    Front const& front) {
  if (count == 0) return {};
  device::ShiftedMoments total{before<kActivate>(front, device::to_float(packs[0].values[0]))};
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    if (k < count) {
      packs[k].forget();
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        total.add(before<kActivate>(front, device::to_float(packs[k].values[v])));
      }
    }
  }
  return total.moments(count * kVector);
}

// The moments of a group from those of its kThreads threads, in every one of them. shared has a
// place for each warp of the block.
template <int kThreads>
__device__ __forceinline__ Moments merge_group(Moments total, Moments* shared) {
  constexpr int kWarps = kThreads / 32;
  total = device::merge_warp(total);
  if constexpr (kWarps > 1) {
    int const warp = threadIdx.x / 32;
    int const first_warp = warp / kWarps * kWarps;
    if (threadIdx.x % 32 == 0) shared[warp] = total;
    __syncthreads();
    // Every warp merges the group's partial moments in the same order.
    total = threadIdx.x % 32 < kWarps ? shared[first_warp + threadIdx.x % 32] : Moments{};
    total = device::merge_warp(total);
  }
  return total;
}

}  // namespace device_resident
}  // namespace fusedconv::groupnorm
