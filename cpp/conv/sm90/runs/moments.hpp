// Moments of a tile's values, by channel. Each lane sums up its own about a shift that is one of
// its warp's values. Then lanes exchange sums until each has those of two channels over the warp,
// and the four warps merge theirs through shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "conv/sm90/runs/params.hpp"
#include "conv/sm90/runs/traits.hpp"
#include "cuda/async.hpp"
#include "cuda/math.hpp"
#include "groupnorm/moments.hpp"

namespace fusedconv::conv::sm90::runs {

inline constexpr int kChannelPairs = kBlockN / 8;  // of a lane

// A warp's sums over its pixels, by channel.
struct WarpMoments {
  float shift[kBlockN];
  float sum[kBlockN];
  float squares[kBlockN];
  float count;
};
static_assert(sizeof(WarpMoments) <= kMomentFloats * sizeof(float));

__device__ __forceinline__ WarpMoments& moments_of(float* base, int warp) {
  return *reinterpret_cast<WarpMoments*>(base + warp * kMomentFloats);
}

// Of a channel, about the shift of the first warp, which always has pixels.
__device__ __forceinline__ device::Moments merge_warps(float* base, int channel) {
  float const shift = moments_of(base, 0).shift[channel];
  float count = 0.0f, sum = 0.0f, squares = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kWarpgroupWarps; ++warp) {
    WarpMoments const& part = moments_of(base, warp);
    if (part.count == 0.0f) continue;
    float const difference = part.shift[channel] - shift;
    float const moved = part.count * difference;
    count += part.count;
    sum += part.sum[channel] + moved;
    squares +=
        part.squares[channel] + fmaf(2.0f * difference, part.sum[channel], moved * difference);
  }
  return device::shifted_moments(count, shift, sum, squares);
}

__device__ __forceinline__ WarpMoments& own_moments(float* base) {
  return moments_of(base, threadIdx.x % kWarpgroupThreads / 32);
}

// By the warpgroup, whose warps have stored their sums: write(channel, partial) for each of so many
// channels. pixels: of the lane's quad in a channel, which it shares with three others.
template <class Write>
__device__ __forceinline__ void merge_tile(float* moments, int pixels, int channels, int barrier,
                                           Write const& write) {
  int const all = __reduce_add_sync(~0u, pixels) / 4;
  if (threadIdx.x % 32 == 0) own_moments(moments).count = float(all);
  device::sync_threads(barrier, kWarpgroupThreads);
  int const channel = threadIdx.x % kWarpgroupThreads;
  if (channel < channels) {
    device::Moments const merged = merge_warps(moments, channel);
    write(channel, TilePartial{merged.mean, merged.low, merged.m2});
  }
  device::sync_threads(barrier, kWarpgroupThreads);
}

// Lanes that differ in one bit share the sums of 2 kHalf channels: each keeps kHalf of both.
template <int kHalf, int kCount>
__device__ __forceinline__ void exchange(float (&sums)[kCount], int bit) {
  bool const high = (threadIdx.x & bit) != 0;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    // Not by a choice of elements, which would need addresses.
    float const first = sums[i], second = sums[i + kHalf];
    sums[i] = (high ? second : first) + __shfl_xor_sync(~0u, high ? first : second, bit);
  }
}

// Sums of kLeft channels of a lane over the eight lanes that have them too, which differ in kBit
// and the bits below it down to 4: each has those of one in the end.
template <int kLeft, int kBit, int kCount>
__device__ __forceinline__ float sum_over_lanes(float (&sums)[kCount]) {
  if constexpr (kBit < 4) {
    return sums[0];
  } else if constexpr (kLeft > 1) {
    exchange<kLeft / 2>(sums, kBit);
    return sum_over_lanes<kLeft / 2, kBit / 2>(sums);
  } else {
    sums[0] += __shfl_xor_sync(~0u, sums[0], kBit);
    return sum_over_lanes<1, kBit / 2>(sums);
  }
}

template <class T>
__device__ __forceinline__ void to_floats(device::Pack<T, kQuad> const (&packs)[2],
                                          float (&floats)[2][kQuad]) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) floats[e][i] = device::to_float(packs[e].values[i]);
  }
}

// Of a lane's quad, the positions that are pixels. Where one begins within the quad, it does at
// half of it.
struct QuadRange {
  int begin, end;

  __device__ __forceinline__ int count() const { return end - begin; }
  __device__ __forceinline__ bool has(int position) const {
    return position >= begin && position < end;
  }
};

// Where nothing is summed up.
struct NoSums {};

// Sums of a lane's values. kWhole: all of a quad's are pixels.
template <bool kWhole>
class LaneSums {
 public:
  // Of the pair of channels `pair` of the lane's; the shift is the first pixel of the first lane
  // that has them.
  __device__ __forceinline__ void add(int pair, float const (&values)[2][kQuad], QuadRange pixels) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      bool const begins_within = !kWhole && pixels.begin > 0;
      float const first = begins_within ? values[e][kQuad / 2] : values[e][0];
      float const shift = __shfl_sync(~0u, first, threadIdx.x % 4);
      if (final_pair() == pair) shifts_[e] = shift;
      float d[kQuad];
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        d[i] = values[e][i] - shift;
        if constexpr (!kWhole) d[i] = pixels.has(i) ? d[i] : 0.0f;
      }
      sums_[2 * pair + e] = (d[0] + d[1]) + (d[2] + d[3]);
      squares_[2 * pair + e] = fmaf(d[0], d[0], d[1] * d[1]) + fmaf(d[2], d[2], d[3] * d[3]);
    }
  }

  template <class T>
  __device__ __forceinline__ void add(int pair, device::Pack<T, kQuad> const (&values)[2],
                                      QuadRange pixels) {
    float floats[2][kQuad];
    to_floats(values, floats);
    add(pair, floats, pixels);
  }

  __device__ __forceinline__ void store(WarpMoments& warp) {
    sum_over_quads(sums_);
    sum_over_quads(squares_);
    int const channel = final_pair() * 8 + threadIdx.x % 4 * 2;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      warp.shift[channel + e] = shifts_[e];
      warp.sum[channel + e] = sums_[e];
      warp.squares[channel + e] = squares_[e];
    }
  }

 private:
  __device__ __forceinline__ static void sum_over_quads(float (&sums)[2 * kChannelPairs]) {
    exchange<8>(sums, 16);
    exchange<4>(sums, 8);
    exchange<2>(sums, 4);
  }
  // The pair of channels of which a lane has the warp's sums in the end.
  __device__ __forceinline__ static int final_pair() {
    int const lane = threadIdx.x % 32;
    return (lane & 16) / 4 | (lane & 8) / 4 | (lane & 4) / 4;
  }

  float sums_[2 * kChannelPairs];
  float squares_[2 * kChannelPairs];
  float shifts_[2];  // of the pair of channels whose sums the lane has in the end
};

// The same of a lane that has kChannels channels, all their phases along width: channel 4 c + t of
// the block where t is the lane modulo 4.
template <int kChannels>
class PhaseSums {
 public:
  // Of channel c of the lane; the first `count` values are pixels.
  template <int kCount>
  __device__ __forceinline__ void add(int c, float const (&values)[kCount], int count) {
    float const shift = __shfl_sync(~0u, values[0], threadIdx.x % 4);
    if (own_channel() == c) shift_ = shift;
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float const d = i < count ? values[i] - shift : 0.0f;
      sum += d;
      squares = fmaf(d, d, squares);
    }
    sums_[c] = sum;
    squares_[c] = squares;
  }

  __device__ __forceinline__ void store(WarpMoments& warp) {
    float const sum = sum_over_lanes<kChannels, 16>(sums_);
    float const squares = sum_over_lanes<kChannels, 16>(squares_);
    int const channel = own_channel() * 4 + threadIdx.x % 4;
    warp.shift[channel] = shift_;
    warp.sum[channel] = sum;
    warp.squares[channel] = squares;
  }

 private:
  // Of which a lane has the warp's sums in the end.
  __device__ __forceinline__ static int own_channel() {
    return int(threadIdx.x) % 32 / 4 * kChannels / 8;
  }

  float sums_[kChannels];
  float squares_[kChannels];
  float shift_;
};

}  // namespace fusedconv::conv::sm90::runs
