// The input, from global memory by registers to shared memory, where channels are innermost.
#pragma once

#include <cstdint>

#include "conv/taps/params.hpp"
#include "conv/taps/traits.hpp"
#include "cuda/math.hpp"

namespace fusedconv::conv::taps {

inline constexpr int kPieces = kChunkBytes / 16;  // of a position in a stage
inline constexpr int kOutside = -1;

// A thread's share of a box: units of 16 bytes of channels by some positions.
template <class Traits>
class BoxLoader {
  using T = typename Traits::Element;
  static constexpr int kVector = Traits::kVector;
  static constexpr bool kPlanes = Traits::kLoads == Loads::kPlanes;
  static constexpr int kUnitPositions = kPlanes ? kVector : 1;
  static constexpr int kUnits = kMostBoxPositions / kUnitPositions * kPieces / kThreads;
  static constexpr int kWords = kPlanes ? 4 * kVector : 4;

 public:
  __device__ __forceinline__ BoxLoader(Params const& p, Block const& block)
      : units_(p.box_positions.divisor / kUnitPositions * kPieces) {
    int64_t const pixels =
        int64_t(p.axes[0].problem.input) * p.axes[1].problem.input * p.axes[2].problem.input;
    int64_t const all = int64_t(p.channels) * p.groups;
    first_channel_ = block.group * p.channels;
    input_ = static_cast<T const*>(p.input) + block.sample * all * pixels;
    channel_stride_ = p.channels_last ? 1 : pixels;
    pixel_stride_ = p.channels_last ? all : 1;
    if (!(p.split[0] || p.split[1] || p.split[2])) locate(p, block, {0, 0, 0});
  }

  // Issues the loads of a stage.
  // step: the first of the stage.
  __device__ __forceinline__ void load(Params const& p, Block const& block, TapList const& taps,
                                       int chunk, int step) {
    if (p.split[0] || p.split[1] || p.split[2]) {
      int tap[kMaxAxes];
      taps.taps(step, tap);
      locate(p, block, tap);
    }
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      int piece, at;
      if (!unit(p, i, piece, at)) break;
      int const channel = chunk * Traits::kChunk + piece * kVector;
      T const* source =
          input_ + (first_channel_ + channel) * channel_stride_ + pixels_[i] * pixel_stride_;
      bool const inside = pixels_[i] != kOutside;
      if constexpr (Traits::kLoads == Loads::kChannels) {
        uint4 value{};
        if (inside && channel < p.channels) value = *reinterpret_cast<uint4 const*>(source);
        keep(i, 0, value);
      } else if constexpr (kPlanes) {
#pragma unroll
        for (int c = 0; c < kVector; ++c) {
          uint4 value{};
          if (inside && channel + c < p.channels) {
            value = *reinterpret_cast<uint4 const*>(source + c * channel_stride_);
          }
          keep(i, 4 * c, value);
        }
      } else {
        device::Pack<T, kVector> pack;
#pragma unroll
        for (int c = 0; c < kVector; ++c) {
          if (inside && channel + c < p.channels) pack.values[c] = source[c * channel_stride_];
        }
#pragma unroll
        for (int w = 0; w < 4; ++w) words_[i][w] = pack.bits[w];
      }
    }
  }

  // Puts what was loaded where the stage's box begins.
  __device__ __forceinline__ void store(Params const& p, unsigned char* box) const {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      int piece, at;
      if (!unit(p, i, piece, at)) break;
      unsigned char* const target = box + at * kPitchBytes + piece * 16;
#pragma unroll
      for (int column = 0; column < kUnitPositions; ++column) {
        uint4 value;
        value.x = word(i, column, 0);
        value.y = word(i, column, 1);
        value.z = word(i, column, 2);
        value.w = word(i, column, 3);
        *reinterpret_cast<uint4*>(target + column * kPitchBytes) = value;
      }
    }
  }

 private:
  // The i-th unit of the thread: which piece of a position's channels, and where its first position
  // is in the box. Neighbouring threads read neighbouring memory.
  __device__ __forceinline__ bool unit(Params const& p, int i, int& piece, int& at) const {
    int const index = int(threadIdx.x) + i * kThreads;
    if (index >= units_) return false;
    if constexpr (Traits::kLoads == Loads::kElements) {
      p.box_positions(piece, at, index);
    } else {
      piece = index % kPieces;
      at = index / kPieces * kUnitPositions;
    }
    return true;
  }

  __device__ __forceinline__ void locate(Params const& p, Block const& block,
                                         int const (&tap)[kMaxAxes]) {
    int first[kMaxAxes];
#pragma unroll
    for (int a = 0; a < kMaxAxes; ++a) {
      Axis const& axis = p.axes[a];
      first[a] = block.origin[a] +
                 (p.split[a] ? axis.lowest_shift - tap[a] * axis.sub_dilation : axis.lowest);
    }
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      int piece, at, d, h, w;
      if (!unit(p, i, piece, at)) break;
      p.box_w(h, w, at);
      p.box_h(d, h, h);
      d += first[0];
      h += first[1];
      w += first[2] - p.lead;
      auto const inside = [&](int a, int position) {
        return unsigned(position) < unsigned(p.axes[a].problem.input);
      };
      pixels_[i] = inside(0, d) && inside(1, h) && inside(2, w)
                       ? (d * p.axes[1].problem.input + h) * p.axes[2].problem.input + w
                       : kOutside;
    }
  }

  __device__ __forceinline__ void keep(int i, int word, uint4 value) {
    words_[i][word] = value.x;
    words_[i][word + 1] = value.y;
    words_[i][word + 2] = value.z;
    words_[i][word + 3] = value.w;
  }

  // A word of a column's channels.
  __device__ __forceinline__ uint32_t word(int i, int column, int index) const {
    uint32_t result;
    if constexpr (!kPlanes) {
      result = words_[i][index];
    } else if constexpr (Traits::kElementBytes == 4) {
      result = words_[i][4 * index + column];
    } else {
      result = __byte_perm(words_[i][8 * index + column / 2], words_[i][8 * index + 4 + column / 2],
                           column % 2 == 0 ? 0x5410 : 0x7632);
    }
    if constexpr (Traits::kRounds) {
      result = __float_as_uint(device::round_to_tf32(__uint_as_float(result)));
    }
    return result;
  }

  T const* input_;
  int64_t channel_stride_, pixel_stride_;
  int units_, first_channel_;
  int pixels_[kUnits];
  uint32_t words_[kUnits][kWords];
};

}  // namespace fusedconv::conv::taps
