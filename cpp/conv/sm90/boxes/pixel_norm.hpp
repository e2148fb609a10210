// LayerNorm over the channels of each pixel, which a block has.
#pragma once

#include "conv/sm90/boxes/columns.hpp"
#include "layernorm/pixel.hpp"

namespace fusedconv::conv::sm90::boxes {

// Of the four lanes that share a row.
__device__ __forceinline__ float total_of_row(float value) {
  value += __shfl_xor_sync(~0u, value, 1);
  return value + __shfl_xor_sync(~0u, value, 2);
}

// Normalises each pixel's channels, of which a block has kPixels times all by position. affine:
// weight and bias by column.
template <class Traits, int kPixels>
__device__ __forceinline__ void normalize_pixels(Params const& p, Consumer const& self,
                                                 float2 const* affine, Sums<Traits>& sums) {
  constexpr int kChannels = Traits::kColumns / kPixels;
  constexpr int kPairs = kChannels / 8;  // of a lane, row and pixel
#pragma unroll
  for (int pixel = 0; pixel < kPixels; ++pixel) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      auto const at = [&](int index) -> float& {
        return sum_at<Traits>(sums, 4 * (pixel * kPairs + index / 2) + 2 * half + index % 2);
      };
      float total = 0.0f;
#pragma unroll
      for (int i = 0; i < 2 * kPairs; ++i) total += at(i);
      float const mean = total_of_row(total) * (1.0f / kChannels);
      float deviations = 0.0f, squares = 0.0f;
#pragma unroll
      for (int i = 0; i < 2 * kPairs; ++i) {
        float const deviation = at(i) - mean;
        deviations += deviation;
        squares = fmaf(deviation, deviation, squares);
      }
      auto const statistics = layernorm::PixelStatistics::of(
          float(kChannels), mean, total_of_row(deviations), total_of_row(squares), p.norm.eps);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        // Of two columns.
        float4 const own =
            reinterpret_cast<float4 const*>(affine)[(pixel * kPairs + i) * 4 + self.lane % 4];
        float &first = at(2 * i), &second = at(2 * i + 1);
        first = statistics.template normalized<true>(first, {own.x, own.y});
        second = statistics.template normalized<true>(second, {own.z, own.w});
      }
    }
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
