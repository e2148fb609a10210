// LayerNorm over the channels of each pixel, which a block has.
#pragma once

#include "conv/sm90/boxes/columns.hpp"
#include "conv/sm90/boxes/linear.hpp"
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

// Normalises each pixel's channels, of which a block has kPixels times all by position. affine:
// weight and bias by column.
template <class Traits, int kPixels>
__device__ __forceinline__ void normalize_pixels(Params const& p, Consumer const& self,
                                                 float2 const* affine, Sums<Traits>& sums) {
  constexpr int kChannels = Traits::kColumns / kPixels;
  constexpr int kPairs = kChannels / 8;  // of columns, of a lane and pixel
#pragma unroll
  for (int pixel = 0; pixel < kPixels; ++pixel) {
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
    layernorm::PixelStatistics statistics[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      statistics[half] = layernorm::PixelStatistics::of(
          float(kChannels), 0.0f, total_of_row(deviations[half][0] + deviations[half][1]),
          total_of_row(squares[half][0] + squares[half][1]), p.norm.eps);
    }
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

}  // namespace fusedconv::conv::sm90::boxes
