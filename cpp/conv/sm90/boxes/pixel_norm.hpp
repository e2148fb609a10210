// LayerNorm over the channels of each pixel, which a block has.
#pragma once

#include "conv/activate.hpp"
#include "conv/sm90/boxes/columns.hpp"
#include "conv/sm90/boxes/linear.hpp"
#include "conv/sm90/boxes/stores.hpp"
#include "layernorm/pixel.hpp"

namespace fusedconv::conv::sm90::boxes {

// Of the four lanes that share a row.
__device__ __forceinline__ float total_of_row(float value) {
  value += __shfl_xor_sync(~0u, value, 1);
  return value + __shfl_xor_sync(~0u, value, 2);
}

// body(row of the lane's two, pair of columns, column of the pair)
template <int kPairs, class Body>
__device__ __forceinline__ void for_each_value(Body const& body) {
#pragma unroll
  for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int e = 0; e < 2; ++e) body(half, pair, e);
    }
  }
}

// Turns the channels of one of a position's kPixels pixels to deviations from the first, and gives
// the statistics of these for each of a lane's rows.
template <class Traits, int kPixels>
__device__ __forceinline__ void take_statistics(Params const& p, Consumer const& self, int pixel,
                                                Sums<Traits>& sums,
                                                layernorm::PixelStatistics (&statistics)[2]) {
  constexpr int kChannels = Traits::kColumns / kPixels;
  constexpr int kPairs = kChannels / 8;  // of columns, of a lane and pixel
  auto const at = [&](int half, int pair, int e) -> float& {
    return sum_at<Traits>(sums, 4 * (pixel * kPairs + pair) + 2 * half + e);
  };
  // From here on values are deviations from the pixel's first: that is off the mean by the
  // deviation times the root of the channels at most, so that one pass has both sums.
  float firsts[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    firsts[half] = __shfl_sync(~0u, at(half, 0, 0), self.lane & ~3);
  }
  // Of both rows, and of even and odd columns apart: chains of additions half as long.
  float deviations[2][2] = {}, squares[2][2] = {};
  for_each_value<kPairs>([&](int half, int pair, int e) {
    float& deviation = at(half, pair, e);
    deviation -= firsts[half];
    deviations[half][e] += deviation;
    squares[half][e] = fmaf(deviation, deviation, squares[half][e]);
  });
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    statistics[half] = layernorm::PixelStatistics::of(
        float(kChannels), 0.0f, total_of_row(deviations[half][0] + deviations[half][1]),
        total_of_row(squares[half][0] + squares[half][1]), p.norm.eps);
  }
}

// Normalises each pixel's channels, of which a block has kPixels times all by position. affine:
// weight and bias by column.
template <class Traits, int kPixels>
__device__ __forceinline__ void normalize_pixels(Params const& p, Consumer const& self,
                                                 float2 const* affine, Sums<Traits>& sums) {
  constexpr int kChannels = Traits::kColumns / kPixels;
  constexpr int kPairs = kChannels / 8;
#pragma unroll
  for (int pixel = 0; pixel < kPixels; ++pixel) {
    auto const at = [&](int half, int pair, int e) -> float& {
      return sum_at<Traits>(sums, 4 * (pixel * kPairs + pair) + 2 * half + e);
    };
    layernorm::PixelStatistics statistics[2];
    take_statistics<Traits, kPixels>(p, self, pixel, sums, statistics);
    for_each_pair<kPairs>(self, affine + pixel * kChannels, [&](int pair, float4 const& own) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float &first = at(half, pair, 0), &second = at(half, pair, 1);
        float const scale = statistics[half].rstd, shift = statistics[half].shift;
        first = fmaf(fmaf(first, scale, shift), own.x, own.y);
        second = fmaf(fmaf(second, scale, shift), own.z, own.w);
      }
    });
  }
}

template <class Traits>
__device__ __forceinline__ void normalize_pixels(Params const& p, Consumer const& self,
                                                 float2 const* affine, Sums<Traits>& sums) {
  switch (Traits::kColumns / p.segment) {
    case 1: normalize_pixels<Traits, 1>(p, self, affine, sums); break;
    case 2: normalize_pixels<Traits, 2>(p, self, affine, sums); break;
    case 4: normalize_pixels<Traits, 4>(p, self, affine, sums); break;
    default:
      if constexpr (Traits::kColumns >= 8 * kMostPixels) {
        normalize_pixels<Traits, kMostPixels>(p, self, affine, sums);
      }
  }
}

// Rows of so many columns that the code that finishes them all would come from memory more slowly
// than it is executed: their portions take turns by the same code.
template <class Traits>
inline constexpr bool kRollsPixels = Traits::kOwnValues;

// A portion's, normalised, into `own`, where all portions are finished.
template <class Traits, int kPortionIndex = 0>
__device__ __forceinline__ void take_portion(layernorm::PixelStatistics const (&statistics)[2],
                                             Sums<Traits>& sums, int portion,
                                             float (&own)[Traits::kPortion / 2]) {
  constexpr int kOwn = Traits::kPortion / 2, kLast = Traits::kColumns / Traits::kPortion - 1;
  if (kPortionIndex == kLast || portion == kPortionIndex) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      layernorm::PixelStatistics const& s = statistics[i / 2 % 2];
      own[i] = fmaf(sum_at<Traits>(sums, kPortionIndex * kOwn + i), s.rstd, s.shift);
    }
  } else if constexpr (kPortionIndex < kLast) {
    take_portion<Traits, kPortionIndex + 1>(statistics, sums, portion, own);
  }
}

// Normalises pixels of which a block has all channels, activates and stores them.
template <class Traits>
__device__ __forceinline__ void finish_pixels(Params const& p, Maps const& maps, Block const& block,
                                              Slab const& slab, Consumer const& self,
                                              float2 const* affine, Sums<Traits>& sums,
                                              unsigned char* staged) {
  constexpr int kPortions = Traits::kColumns / Traits::kPortion;
  constexpr int kStaged = Traits::kShape.staged_portions();
  layernorm::PixelStatistics statistics[2];
  take_statistics<Traits, 1>(p, self, 0, sums, statistics);
  float own[Traits::kPortion / 2];
  take_portion<Traits>(statistics, sums, 0, own);
#pragma unroll 1
  for (int portion = 0;;) {
    for_each_pair<Traits::kPortion / 8>(
        self, affine + portion * Traits::kPortion, [&](int pair, float4 const& columns) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float &first = own[4 * pair + 2 * half], &second = own[4 * pair + 2 * half + 1];
            first = fmaf(first, columns.x, columns.y);
            second = fmaf(second, columns.z, columns.w);
          }
        });
    dispatch_activation(p.activation, [&](auto form) {
#pragma unroll
      for (float& value : own) {
        value = last_activated<typename Traits::Element, decltype(form)>(value);
      }
    });
    unsigned char* const to = staged + portion % kStaged * Memory::kPortionBytes;
    // The copies of the portion that lay here have read it.
    if (self.thread == 0) device::wait_stores_read<kStaged - 1>();
    self.sync();
    stage_pixels<Traits>(p, self, [&](int index) { return own[index]; }, to);
    device::fence_async_proxy();
    self.sync();
    if (self.thread == 0) {
      store_pixels<Traits>(p, maps, Result::kOutput, block, slab, portion, to);
      device::commit_stores();
    }
    if (++portion == kPortions) break;
    take_portion<Traits>(statistics, sums, portion, own);
  }
}

}  // namespace fusedconv::conv::sm90::boxes
