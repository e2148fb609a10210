// What becomes of a line's sums: a warp adds the bias to those of its 16 output channels, and
// stores them by shared memory, where a channel's positions lie side by side. Lines of the output
// that begin at whole 16 bytes are stored by tensor copies, others by lines of the cache: what takes
// part of a sector counts in it like all of it. Copies of each channel's whole 16 bytes, with the
// words beside them, take 1.9 ms where these take 1.2, and vectors in place of such copies 1.7.
#pragma once

#include <cstdint>

#include "conv/sm90/strips/params.hpp"
#include "conv/sm90/strips/traits.hpp"
#include "conv/sm90/strips/vectors.hpp"
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
      if (p.tensor_copies && lane_ == 0) device::wait_stores_read();
      __syncwarp();
      stage(sums, portion * kUnits);
      if (p.tensor_copies) device::fence_async_proxy();
      __syncwarp();
      if (!p.tensor_copies) {
        store_line(p, sample, line, column);
      } else if (lane_ == 0) {
        cute::SM90_TMA_STORE_5D::copy(&maps.output, staged_, column, line, channel0_, sample, 0);
        device::commit_stores();
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

  // Of lines that do not begin at whole 16 bytes.
  __device__ __forceinline__ void store_line(Params const& p, int sample, int line,
                                             int column) const {
    int const width = min(kPortion, p.width - column), plane = p.height * p.width;
    int64_t const from = (int64_t(sample) * p.channels + channel0_) * plane +
                         int64_t(line) * p.width + column;
    T* const target = static_cast<T*>(p.output) + from;
    if (p.pairs) {
      store_words(p, reinterpret_cast<uint32_t*>(target), plane / 2, width / 2);
    } else {
      store_elements(p, target, plane, width);
    }
  }

  // Two neighbours of a unit.
  __device__ __forceinline__ uint32_t pair(float const (&sums)[Traits::kSums], int unit,
                                           int r) const {
    float const* const at = sums + unit * 4 + 2 * r;
    return device::Pack<T, 2>::of({at[0] + bias_[r], at[1] + bias_[r]}).bits[0];
  }

  // From a unit on, as tensor copies read them. Eight channels of eight positions are a matrix.
  __device__ __forceinline__ void stage(float const (&sums)[Traits::kSums], int first) const {
    int const row = lane_ % 16;
    uint32_t const own = device::shared_address(staged_) + row * (kPortion * 2);
#pragma unroll
    for (int unit = 0; unit < kUnits; unit += 2) {
      // The last of an odd number is stored twice.
      int const other = unit + 1 < kUnits ? unit + 1 : unit, at = lane_ < 16 ? unit : other;
      device::store_matrices(own + (kSwizzled ? at ^ row % 8 : at) * kVectorBytes,
                             {pair(sums, first + unit, 0), pair(sums, first + unit, 1),
                              pair(sums, first + other, 0), pair(sums, first + other, 1)});
    }
  }

  // Of a staged portion.
  __device__ __forceinline__ uint32_t word_at(int row, int word) const {
    int const unit = kSwizzled ? word / 4 ^ row % 8 : word / 4;
    return device::shared_address(staged_) + row * (kPortion * 2) + unit * kVectorBytes +
           word % 4 * 4;
  }

  // plane, width: in words; so many of each channel. A store has what is of one line of the cache.
  __device__ __forceinline__ void store_words(Params const& p, uint32_t* target, int plane,
                                              int width) const {
    constexpr int kLineWords = 32, kLines = (kPortion / 2 + kLineWords - 2) / kLineWords + 1;
    constexpr int kTogether = 4;
    auto const start = uint32_t(reinterpret_cast<std::uintptr_t>(target) / 4);
    int const rows = min(kStepChannels, p.channels - channel0_);
    // Of a channel's words, in its i-th line of the cache.
    auto const own_word = [&](int row, int i) {
      return i * kLineWords + lane_ - int((start + uint32_t(row) * uint32_t(plane)) % kLineWords);
    };
    auto const is_there = [&](int row, int word) {
      return row < rows && word >= 0 && word < width;
    };
#pragma unroll 1
    for (int first = 0; first < kStepChannels; first += kTogether) {
      uint32_t words[kTogether][kLines];
#pragma unroll
      for (int r = 0; r < kTogether; ++r) {
#pragma unroll
        for (int i = 0; i < kLines; ++i) {
          int const word = own_word(first + r, i);
          if (is_there(first + r, word)) words[r][i] = device::load_word(word_at(first + r, word));
        }
      }
#pragma unroll
      for (int r = 0; r < kTogether; ++r) {
#pragma unroll
        for (int i = 0; i < kLines; ++i) {
          int const word = own_word(first + r, i);
          if (is_there(first + r, word)) {
            target[int64_t(first + r) * plane + word] = words[r][i];
          }
        }
      }
    }
  }

  // Of lines of an odd width, one after the other.
  __device__ __forceinline__ void store_elements(Params const& p, T* target, int plane,
                                                 int width) const {
#pragma unroll 1
    for (int row = 0; row < min(kStepChannels, p.channels - channel0_); ++row) {
#pragma unroll 1
      for (int at = lane_; at < width; at += 32) {
        uint32_t const bits = device::load_word(word_at(row, at / 2));
        reinterpret_cast<uint16_t*>(target)[int64_t(row) * plane + at] =
            uint16_t(bits >> at % 2 * 16);
      }
    }
  }

  unsigned char* staged_;
  int lane_, channel0_;
  float bias_[2];
};

}  // namespace fusedconv::conv::sm90::strips
