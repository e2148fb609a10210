// The bias's gradient beside the weight's, where each pixel of the output's gradient is read at one
// tap: blocks of the first input channels sum what they multiply these by, before TF32 rounds it.
#pragma once

#include <cstdint>

#include "conv/sm90/boxes/traits.hpp"
#include "conv/sm90/boxes/weight/params.hpp"
#include "cuda/async.hpp"
#include "cuda/math.hpp"

namespace fusedconv::conv::sm90::boxes::weight {

static_assert(kConsumerWarps == kWarpgroupWarps);

// A part of the sum of a unit's channel.
template <class Traits>
__device__ __forceinline__ void leave_bias_sum(Params const& p, BlockWork const& work, int unit,
                                               int within, int share, float sum) {
  if (unit >= p.units) return;
  Unit const at(p, unit);
  int const channel = at.channel + within;
  if (channel >= p.bias_channels) return;
  int const part = (work.split * p.taps_read + at.tap) * Traits::kBlock.bias_shares() + share;
  p.bias_sums[int64_t(channel) * p.bias_parts + part] = sum;
}

// From the rows that a thread has loaded as operands: of its units two channels each, and of every
// four positions one.
template <class Traits>
class BiasOfWords {
 public:
  __device__ __forceinline__ static BiasOfWords of(int consumer, int thread) {
    BiasOfWords result;
    result.first_unit_ = consumer * Traits::kOwnUnits;
    result.thread_ = thread;
    return result;
  }
  template <int kSteps>
  __device__ __forceinline__ void add_and_round(int unit, uint32_t (&words)[kSteps][4]) {
    float totals[2] = {};
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float const value = __uint_as_float(words[i][e]);
        totals[e % 2] += value;
        words[i][e] = __float_as_uint(device::round_to_tf32(value));
      }
    }
    sums_[unit][0] += totals[0];
    sums_[unit][1] += totals[1];
  }

  // first_unit: of the block.
  __device__ __forceinline__ void leave(Params const& p, BlockWork const& work, int first_unit) {
#pragma unroll
    for (int u = 0; u < Traits::kInstructions; ++u) {
#pragma unroll
      for (int lower = 0; lower < 2; ++lower) {
        float sum = sums_[u][lower];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        int const within = channel_of_row(thread_ / 32, lower, thread_ % 32 / 4);
        if (thread_ % 4 == 0) {
          leave_bias_sum<Traits>(p, work, first_unit + first_unit_ + u, within, 0, sum);
        }
      }
    }
  }

 private:
  int first_unit_, thread_;
  float sums_[Traits::kInstructions][2] = {};
};

// From the units in shared memory while their products are formed: of the block's consumers' warps
// as many have a unit, each so many of its positions, and a lane eight channels.
template <class Traits>
class BiasOfTiles {
 public:
  __device__ __forceinline__ static BiasOfTiles of(int consumer, int thread) {
    BiasOfTiles result;
    result.warp_ = consumer * kWarpgroupWarps + thread / 32;
    result.lane_ = thread % 32;
    int const row = result.warp_ % kWarps * kRows + result.lane_ / 8;
    result.at_ = uint32_t(result.warp_ / kWarps * kTileBytes + row * kChunkBytes +
                          (result.lane_ % 8 ^ result.lane_ / 8) * kPieceBytes);
    return result;
  }

  // units: of a stage.
  __device__ __forceinline__ void add(unsigned char const* units) {
    float totals[8] = {};
#pragma unroll
    for (int row = 0; row < kRows; row += 4) {
      // Swizzles exchange pieces by a row's number, whose bit 2 is this row's.
      uint32_t const at = (at_ + row * kChunkBytes) ^ (row & 4) * kPieceBytes;
      auto const pack =
          device::Pack<Element, 8>::load(reinterpret_cast<Element const*>(units + at));
#pragma unroll
      for (int i = 0; i < 8; ++i) totals[i] += device::to_float(pack.values[i]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) sums_[i] += totals[i];
  }

  __device__ __forceinline__ void leave(Params const& p, BlockWork const& work, int first_unit) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float sum = sums_[i];
      sum += __shfl_xor_sync(~0u, sum, 8);
      sum += __shfl_xor_sync(~0u, sum, 16);
      if (lane_ < 8) {
        leave_bias_sum<Traits>(p, work, first_unit + warp_ / kWarps, lane_ * 8 + i, warp_ % kWarps,
                               sum);
      }
    }
  }

 private:
  using Element = typename Traits::Element;
  static constexpr int kWarps = Traits::kBlock.bias_shares();  // of a unit
  static constexpr int kRows = kSlab / kWarps;                 // of a warp
  static_assert(kWarps >= 1 && kRows % 8 == 0);

  int warp_, lane_;
  uint32_t at_;
  float sums_[8] = {};
};

}  // namespace fusedconv::conv::sm90::boxes::weight
