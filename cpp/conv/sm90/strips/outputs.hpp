// What becomes of a line's sums: a warp adds the bias to those of its 16 output channels, and
// stores them by shared memory, where a channel's positions lie side by side.
#pragma once

#include <cstdint>

#include "conv/sm90/strips/params.hpp"
#include "conv/sm90/strips/traits.hpp"
#include "cuda/async.hpp"
#include "cuda/math.hpp"
#include "cute/arch/copy_sm90_tma.hpp"

namespace fusedconv::conv::sm90::strips {

template <class Traits>
class Outputs {
 public:
  // staged: the warp's.
  __device__ __forceinline__ Outputs(Params const& p, Block const& block, unsigned char* staged,
                                     int warp, int lane)
      : staged_(staged), lane_(lane), channel0_(block.channel0 + warp * kStepChannels) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      int const channel = channel0_ + lane / 4 + 8 * r;
      bias_[r] = p.bias != nullptr && channel < p.channels
                     ? device::to_float(static_cast<T const*>(p.bias)[channel])
                     : 0.0f;
    }
  }

  // Sum 4 j + 2 r + e is of channel lane / 4 + 8 r, position 8 j + lane % 4 * 2 + e.
  __device__ __forceinline__ void store(Params const& p, Maps const& maps, int sample, int line,
                                        int column0, float const (&sums)[Traits::kSums]) const {
#pragma unroll
    for (int portion = 0; portion < kShape.positions / kPortion; ++portion) {
      int const column = column0 + portion * kPortion;
      if (p.copies && lane_ == 0) device::wait_stores_read();
      __syncwarp();
      stage(sums, portion * kUnits);
      if (p.copies) {
        device::fence_async_proxy();
        __syncwarp();
        if (lane_ == 0) {
          cute::SM90_TMA_STORE_5D::copy(&maps.output, staged_, column, line, channel0_, sample, 0);
          device::commit_stores();
        }
      } else {
        __syncwarp();
        store_words(p, sample, line, column);
      }
    }
  }

 private:
  using T = typename Traits::Element;
  static constexpr Shape kShape = Traits::kShape;
  static constexpr int kPortion = kShape.portion();
  static constexpr int kUnits = kPortion / kGranule;
  static constexpr bool kSwizzled = kUnits == 8;
  static_assert(kSwizzled || kUnits % 2 == 1, "rows of an odd number of vectors have no conflicts");

  __device__ __forceinline__ static uint32_t offset(int row, int unit) {
    return row * (kPortion * 2) + (kSwizzled ? unit ^ row % 8 : unit) * kVectorBytes;
  }

  // Eight channels of eight positions are a matrix: a unit's first eight rows, and its others.
  __device__ __forceinline__ void stage(float const (&sums)[Traits::kSums], int first) const {
    uint32_t const staged = device::shared_address(staged_);
    int const row = lane_ % 16;
#pragma unroll
    for (int unit = 0; unit < kUnits; unit += 2) {
      // The last of an odd number is stored twice.
      int const other = unit + 1 < kUnits ? unit + 1 : unit;
      auto const pair = [&](int unit, int r) {
        float const* const at = sums + (first + unit) * 4 + 2 * r;
        return device::Pack<T, 2>::of({at[0] + bias_[r], at[1] + bias_[r]}).bits[0];
      };
      device::store_matrices(staged + offset(row, lane_ < 16 ? unit : other),
                             {pair(unit, 0), pair(unit, 1), pair(other, 0), pair(other, 1)});
    }
  }

  // Where lines do not begin at whole 16 bytes: a channel after the other, two positions of a lane.
  __device__ __forceinline__ void store_words(Params const& p, int sample, int line,
                                              int column0) const {
    constexpr int kWords = kPortion / 2;
    uint32_t const staged = device::shared_address(staged_);
    int const rows = min(kStepChannels, p.channels - channel0_);
    int64_t const plane = int64_t(p.height) * p.width;
    T* const first = static_cast<T*>(p.output) +
                     (int64_t(sample) * p.channels + channel0_) * plane +
                     int64_t(line) * p.width + column0;
#pragma unroll 4
    for (int row = 0; row < rows; ++row) {
#pragma unroll
      for (int from = 0; from < kWords; from += 32) {
        int const word = from + lane_, left = p.width - column0 - 2 * word;
        if (word >= kWords || left <= 0) continue;
        uint32_t const bits = device::load_word(staged + offset(row, word / 4) + word % 4 * 4);
        T* const target = first + row * plane + 2 * word;
        if (p.pairs) {
          *reinterpret_cast<uint32_t*>(target) = bits;
        } else {
          device::Pack<T, 2> pack;
          pack.bits[0] = bits;
          target[0] = pack.values[0];
          if (left > 1) target[1] = pack.values[1];
        }
      }
    }
  }

  unsigned char* staged_;
  int lane_, channel0_;
  float bias_[2];
};

}  // namespace fusedconv::conv::sm90::strips
