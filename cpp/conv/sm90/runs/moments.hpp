// Moments of a tile's values, by channel. Each lane sums up its own about a shift that is one of
// its warp's values. Then lanes exchange sums until each has those of two channels over the warp,
// and the four warps merge theirs through shared memory.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "conv/mma_sync.hpp"
#include "conv/sm90/runs/params.hpp"
#include "conv/sm90/runs/traits.hpp"
#include "cuda/math.hpp"
#include "cuda/pair.hpp"
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

template <class T>
__device__ __forceinline__ void to_floats(device::Pack<T, kQuad> const (&packs)[2],
                                          float (&floats)[2][kQuad]) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) floats[e][i] = device::to_float(packs[e].values[i]);
  }
}

// Where nothing is summed up.
struct NoSums {};

// Sums of a lane's values. kWhole: all of a quad's are pixels, else `count` of them.
template <bool kWhole>
class LaneSums {
 public:
  // Of the pair of channels `pair` of the lane's; the shift is what the first lane that has them
  // has first.
  __device__ __forceinline__ void add(int pair, float const (&values)[2][kQuad], int count) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float const shift = __shfl_sync(~0u, values[e][0], threadIdx.x % 4);
      if (final_pair() == pair) shifts_[e] = shift;
      float d[kQuad];
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        d[i] = values[e][i] - shift;
        if constexpr (!kWhole) d[i] = i < count ? d[i] : 0.0f;
      }
      sums_[2 * pair + e] = (d[0] + d[1]) + (d[2] + d[3]);
      squares_[2 * pair + e] = fmaf(d[0], d[0], d[1] * d[1]) + fmaf(d[2], d[2], d[3] * d[3]);
    }
  }

  template <class T>
  __device__ __forceinline__ void add(int pair, device::Pack<T, kQuad> const (&values)[2],
                                      int count) {
    float floats[2][kQuad];
    to_floats(values, floats);
    add(pair, floats, count);
  }

  __device__ __forceinline__ bool store(WarpMoments& warp) {
    sum_over_quads(sums_);
    sum_over_quads(squares_);
    int const channel = final_pair() * 8 + threadIdx.x % 4 * 2;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      warp.shift[channel + e] = shifts_[e];
      warp.sum[channel + e] = sums_[e];
      warp.squares[channel + e] = squares_[e];
    }
    return true;
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

// The same of values that are stored as bf16, by pairs of them: a quad's are summed, and their
// squares, with rounding to bf16; those sums the tensor core multiplies by ones and zeros, so that
// rows of the product are channels and columns the warp's quads. Where something is infinite or not
// a number, which times zero is not a number, nothing of this holds, as store() tells.
template <bool kWhole>
class PackedLaneSums {
 public:
  using Quad = device::Pack<__nv_bfloat16, kQuad>;

  __device__ __forceinline__ PackedLaneSums() {
    int const row = lane() / 4, channel = lane() % 4 * 2;
    selector_[0] = row == channel ? kOnes : 0u;
    selector_[1] = row == channel + 1 ? kOnes : 0u;
  }

  __device__ __forceinline__ void add(int pair, Quad const (&values)[2], int count) {
    // The low values of both channels.
    uint32_t const shifts = __shfl_sync(
        ~0u, __byte_perm(values[0].bits[0], values[1].bits[0], 0x5410), threadIdx.x % 4);
    if (lane() / 4 == pair) shifts_ = shifts;
    uint32_t sums[2], squares[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      uint32_t const shift = __byte_perm(shifts, 0, e == 0 ? 0x1010 : 0x3232);
      uint32_t d[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        d[i] = device::difference_of_pairs(values[e].bits[i], shift);
        if constexpr (!kWhole) {
          d[i] &= (2 * i < count ? 0xffffu : 0u) | (2 * i + 1 < count ? 0xffff0000u : 0u);
        }
      }
      sums[e] = device::sum_of_pairs(d[0], d[1]);
      squares[e] = device::square_of_pairs(d[0], d[1]);
    }
    add_rows(sums_[pair / 2], pair % 2, sums);
    add_rows(squares_[pair / 2], pair % 2, squares);
  }

  // Returns whether the sums are.
  __device__ __forceinline__ bool store(WarpMoments& warp) {
    float2 const shifts = device::to_pair<__nv_bfloat16>(shifts_);
    *reinterpret_cast<float2*>(&warp.shift[8 * (lane() / 4) + lane() % 4 * 2]) = shifts;
    store(warp.sum, sums_);
    // A product that is not a number, or too large, is not in a sum without being in its squares'.
    return __all_sync(~0u, store(warp.squares, squares_));
  }

 private:
  static constexpr uint32_t kOnes = 0x3f803f80u;

  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }

  // Of a pair of channel pairs the second takes the lower rows.
  __device__ __forceinline__ void add_rows(float (&rows)[4], int second,
                                           uint32_t const (&terms)[2]) const {
    cute::SM80_16x8x16_F32BF16BF16F32_TN::fma(
        rows[0], rows[1], rows[2], rows[3], second ? 0u : selector_[0], second ? selector_[0] : 0u,
        second ? 0u : selector_[1], second ? selector_[1] : 0u, terms[0], terms[1],
        second ? rows[0] : 0.0f, second ? rows[1] : 0.0f, second ? rows[2] : 0.0f,
        second ? rows[3] : 0.0f);
  }
  // A lane has of channel lane / 4 of each pair the sums of two quads.
  __device__ __forceinline__ static bool store(float* target,
                                               float const (&rows)[kChannelPairs / 2][4]) {
    float sums[kChannelPairs];
#pragma unroll
    for (int i = 0; i < kChannelPairs / 2; ++i) {
      sums[2 * i] = rows[i][0] + rows[i][1];
      sums[2 * i + 1] = rows[i][2] + rows[i][3];
    }
    exchange<4>(sums, 1);
    exchange<2>(sums, 2);
    int const pair = (lane() & 1) * 4 | (lane() & 2);
    target[8 * pair + lane() / 4] = sums[0];
    target[8 * (pair + 1) + lane() / 4] = sums[1];
    return sums[0] < INFINITY && sums[1] < INFINITY;
  }

  uint32_t selector_[2];
  float sums_[kChannelPairs / 2][4];
  float squares_[kChannelPairs / 2][4];
  uint32_t shifts_;  // of the pair of channels lane / 4
};

// Of outputs of T, that are activated before they are stored or only for their moments' sake.
template <class T, bool kWhole, bool kActivated, bool kSumsUp>
using SumsOf = std::conditional_t<!kSumsUp, NoSums,
                                  std::conditional_t<kActivated && std::is_same_v<T, __nv_bfloat16>,
                                                     PackedLaneSums<kWhole>, LaneSums<kWhole>>>;

}  // namespace fusedconv::conv::sm90::runs
