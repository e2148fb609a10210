// Moments of output channels: of a thread, and channels first over a team.
#pragma once

#include <cstdint>

#include "conv/direct/params.hpp"
#include "conv/direct/team.hpp"
#include "groupnorm/moments.hpp"

namespace fusedconv::conv::direct {

// A thread's: of as many values of each channel.
template <int kChannels>
struct ChannelMoments {
  device::ShiftedMoments moments[kChannels];
  int count = 0;

  // Of the first `added` values of a row of each channel, about the first that comes. A row's own
  // sums are short chains, which do not wait for those of other rows.
  template <int kCount, class RowOf>
  __device__ __forceinline__ void add(int added, RowOf const& row_of) {
    if (count == 0) {
#pragma unroll
      for (int k = 0; k < kChannels; ++k) moments[k].shift = row_of(k)[0];
    }
    count += added;
    if (added == kCount) {
      add_rows<kCount, true>(added, row_of);
    } else {
      add_rows<kCount, false>(added, row_of);
    }
  }

 private:
  template <int kCount, bool kWhole, class RowOf>
  __device__ __forceinline__ void add_rows(int added, RowOf const& row_of) {
#pragma unroll
    for (int k = 0; k < kChannels; ++k) {
      float const(&values)[kCount] = row_of(k);
      float const first = values[0] - moments[k].shift;
      device::ShiftedMoments row{moments[k].shift, first, first * first};
#pragma unroll
      for (int v = 1; v < kCount; ++v) {
        if (kWhole || v < added) row.add(values[v]);
      }
      moments[k].sum += row.sum;
      moments[k].squares += row.squares;
    }
  }
};

// Of a block's warps, in shared memory: for one group of channels while the one before it is
// merged.
template <int kChannels>
class WarpMoments {
  static constexpr int kWarps = kThreads / kWarp;
  static_assert(kChannels <= kMostChannels && kChannels * kWarps <= kWarp);

 public:
  __device__ __forceinline__ WarpMoments(Params const& p, unsigned char* shared)
      : warps_(p.team_threads / kWarp), moments_(reinterpret_cast<device::Moments*>(shared)) {}

  // Brings each lane's sums to the shift of the first lane that has values, and adds them in a
  // fixed tree. That shift is one of the warp's values: the reason of Moments::add() holds.
  __device__ __forceinline__ void leave(int group, ChannelMoments<kChannels> const& own) const {
    int const lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
    int const first = max(__ffs(int(__ballot_sync(~0u, own.count > 0))) - 1, 0);
    float const count = float(own.count), total = float(__reduce_add_sync(~0u, own.count));
    float const share = total > 0.0f ? 1.0f / total : 0.0f;
#pragma unroll
    for (int k = 0; k < kChannels; ++k) {
      device::ShiftedMoments const& value = own.moments[k];
      float const shift = __shfl_sync(~0u, value.shift, first);
      float const delta = own.count > 0 ? value.shift - shift : 0.0f;
      float sum = fmaf(count, delta, value.sum);
      float squares = fmaf(delta, value.sum + sum, value.squares);
#pragma unroll
      for (int step = kWarp / 2; step > 0; step /= 2) {
        sum += __shfl_down_sync(~0u, sum, step);
        squares += __shfl_down_sync(~0u, squares, step);
      }
      float const offset = sum * share;
      float2 const mean = device::fast_two_sum(shift, offset);
      if (lane != 0) continue;
      moments_[(group % 2 * kChannels + k) * kWarps + warp] = {total, mean.x, mean.y,
                                                               fmaf(-sum, offset, squares)};
    }
  }

  // By a warp of the team, after a barrier; another for each group, as others go on meanwhile.
  // target(channel of the group): where its moments go, or null.
  template <class T, class Target>
  __device__ __forceinline__ void merge(Params const& p, Team<T> const& team, int group,
                                        Target const& target) const {
    int const own = team.thread / kWarp;
    if (own != group % warps_) return;
    int const first = int(threadIdx.x) / kWarp - own;
    int const k = int(threadIdx.x) % kWarp / kWarps, warp = int(threadIdx.x) % kWarps;
    device::Moments value;
    if (k < kChannels && warp < warps_) {
      value = moments_[(group % 2 * kChannels + k) * kWarps + first + warp];
    }
    value = device::merge_warp<kWarps>(value);
    if (k >= kChannels || warp != 0) return;
    if (groupnorm::Partial* const to = target(k)) *to = value.partial();
  }

 private:
  int warps_;
  device::Moments* moments_;
};

}  // namespace fusedconv::conv::direct
