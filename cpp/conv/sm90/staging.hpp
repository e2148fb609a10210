// How input gets into a stage: as K-major planes of positions, 16 bytes each, the first half of a
// k-block's channels in one plane and the second half in the next; in strict fp32 the big parts of
// all values, then the small ones.
#pragma once

#include <cstdint>

#include "conv/sm90/params.hpp"
#include "conv/sm90/traits.hpp"
#include "cuda/math.hpp"

namespace fusedconv::conv::sm90 {

// A predicate instead of a branch keeps the stores of several positions in one run of instructions.
__device__ __forceinline__ void store_shared(bool present, uint32_t target, uint32_t a, uint32_t b,
                                             uint32_t c, uint32_t d) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %5, 0;\n"
      "@p st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n"
      "}" ::"r"(target),
      "r"(a), "r"(b), "r"(c), "r"(d), "r"(uint32_t(present))
      : "memory");
}

// Stages one 16-byte piece of a position: four floats, rounded, or split in two. TMA has rounded
// already where that is the mode.
template <class Traits, bool kRounded>
__device__ __forceinline__ void stage_piece(bool present, uint32_t target, uint32_t small_offset,
                                            float const (&v)[4]) {
  float big[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (Traits::kSplits) {
      big[i] = device::big_tf32(v[i]);
    } else {
      big[i] = kRounded ? v[i] : device::round_to_tf32(v[i]);
    }
  }
  store_shared(present, target, __float_as_uint(big[0]), __float_as_uint(big[1]),
               __float_as_uint(big[2]), __float_as_uint(big[3]));
  if constexpr (Traits::kSplits) {
    uint32_t small[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) small[i] = __float_as_uint(device::round_to_tf32(v[i] - big[i]));
    store_shared(present, target + small_offset, small[0], small[1], small[2], small[3]);
  }
}

// Loads the input element by element: for inputs whose rows are not whole multiples of 16 bytes.
template <class Traits>
struct ElementLoader {
  using T = typename Traits::Element;
  static constexpr int kCount = kMaxStagedPositions / kWarpgroupThreads;  // positions of a thread

  int offsets[kCount];  // in pixels; -1 for the zeros around the input
  int thread;

  __device__ __forceinline__ explicit ElementLoader(int thread) : thread(thread) {}
  __device__ __forceinline__ int staged_position(int i) const {
    return thread + kWarpgroupThreads * i;
  }

  __device__ __forceinline__ void locate(Params const& p, int strip, int position0) {
    int const column0 = strip * p.raster.strip_width - p.lower_w;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      int const staged = staged_position(i);
      int position = position0 + staged;
      if (!p.contiguous) {
        int tap, rest;
        p.staged_row_division(tap, rest, staged);
        position = position0 + tap * p.tap_step_h + rest;
      }
      int row, column, slice;
      p.raster.pitch_w(row, column, position);
      p.raster.pitch_h(slice, row, row);
      column += column0;
      row -= p.lower_h;
      slice -= p.lower_d;
      bool const inside = staged < p.staged_positions && unsigned(column) < unsigned(p.w) &&
                          unsigned(row) < unsigned(p.h) && unsigned(slice) < unsigned(p.d);
      offsets[i] = inside ? (slice * p.h + row) * p.w + column : -1;
    }
  }

  // One k-block, of which `channels` are there.
  __device__ __forceinline__ void load(Params const& p, T const* base, int channels,
                                       uint32_t target, uint32_t small) const {
    constexpr int kChannels = Traits::kKBlock;
    constexpr int kAtOnce = 16 / kChannels;
    static_assert(kCount % kAtOnce == 0);
#pragma unroll
    for (int first = 0; first < kCount; first += kAtOnce) {
      if (first * kWarpgroupThreads >= p.staged_positions) break;
      T values[kAtOnce][kChannels];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        int const offset = offsets[first + i];
        T const* const source = base + int64_t(offset) * p.pixel_stride;
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          values[i][c] = T(0.0f);
          if (offset >= 0 && c < channels) values[i][c] = __ldg(source + c * p.channel_stride);
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        int const staged = staged_position(first + i);
        bool const present = staged < p.staged_positions;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t const address = target + (half * p.plane_pitch + staged) * 16;
          if constexpr (sizeof(T) == 4) {
            float const(&v)[8] = values[i];
            float const piece[4] = {v[half * 4], v[half * 4 + 1], v[half * 4 + 2], v[half * 4 + 3]};
            stage_piece<Traits, false>(present, address, small, piece);
          } else {
            device::Pack<T, 8> piece;
#pragma unroll
            for (int c = 0; c < 8; ++c) piece.values[c] = values[i][half * 8 + c];
            store_shared(present, address, piece.bits[0], piece.bits[1], piece.bits[2],
                         piece.bits[3]);
          }
        }
      }
    }
  }
};

// Columns before a strip's first one: boxes of TMA start at multiples of 16 bytes.
template <class Traits>
__device__ __forceinline__ int lead(Params const& p, int strip) {
  if (Traits::kLayout == Layout::kChannelsLast) return 0;
  return (strip * p.raster.strip_width - p.lower_w) & (16 / Traits::kElementBytes - 1);
}

// Brings rows that TMA has landed into the tensor core's order. Channels first they lie as
// [k-block, row, channel, column], channels last as [k-block, row, column, channel].
template <class Traits>
struct Transposer {
  // Channels last: two threads a position. Channels first: one, or for 16 bits one for two
  // positions.
  static constexpr bool kPairs =
      Traits::kLayout == Layout::kChannelsFirst && Traits::kElementBytes == 2;
  static constexpr int kLanes = Traits::kLayout == Layout::kChannelsLast ? 2 : 1;
  static constexpr int kPositions = kPairs ? 2 : 1;
  static constexpr int kStep = kWarpgroupThreads * kPositions / kLanes;
  static constexpr int kCount = kMaxStagedPositions / kStep;
  static constexpr int kAtOnce = kPairs ? 2 : 4;
  static_assert(kCount % kAtOnce == 0);

  int offsets[kCount];  // of the thread's positions in a TMA stage, in bytes
  bool odd;             // pairs lie at odd multiples of two bytes

  __device__ __forceinline__ static int staged_position(int i) {
    return int(threadIdx.x) % kWarpgroupThreads / kLanes * kPositions + i * kStep;
  }

  __device__ __forceinline__ void locate(Params const& p, int strip, int position0) {
    int const before = lead<Traits>(p, strip);
    odd = before % 2 != 0;
    int row0, column0;
    p.raster.pitch_w(row0, column0, position0);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i / kAtOnce * kAtOnce * kStep >= p.staged_positions) break;
      int row, column;
      p.raster.pitch_w(
          row, column,
          column0 + min(staged_position(i), (p.staged_positions - 1) / kPositions * kPositions));
      offsets[i] = row * p.input_row_elements * kKBlockBytes +
                   (column + before) * (kLanes == 2 ? kKBlockBytes : Traits::kElementBytes) +
                   (kLanes == 2 ? int(threadIdx.x) % 2 * 16 : 0);
    }
  }

  // One k-block. All loads of a round come before its stores; positions behind the last one load
  // what that one does. `ready` is called between the first loads and the first stores.
  template <class Ready>
  __device__ __forceinline__ void transpose(Params const& p, int source_offset, uint32_t target,
                                            uint32_t small, Ready&& ready) const {
    extern __shared__ __align__(1024) unsigned char shared[];
    unsigned char const* const source = shared + source_offset;
    int const channel_bytes = p.input_row_elements * Traits::kElementBytes;
    uint32_t const plane = uint32_t(p.plane_pitch) * 16;
#pragma unroll
    for (int first = 0; first < kCount; first += kAtOnce) {
      if (first * kStep >= p.staged_positions) break;
      if constexpr (kLanes == 2) {
        uint4 values[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          values[i] = *reinterpret_cast<uint4 const*>(source + offsets[first + i]);
        }
        if (first == 0) ready();
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          int const staged = staged_position(first + i);
          uint32_t const address = target + threadIdx.x % 2 * plane + uint32_t(staged) * 16;
          bool const present = staged < p.staged_positions;
          if constexpr (Traits::kElementBytes == 4) {
            float const piece[4] = {__uint_as_float(values[i].x), __uint_as_float(values[i].y),
                                    __uint_as_float(values[i].z), __uint_as_float(values[i].w)};
            stage_piece<Traits, true>(present, address, small, piece);
          } else {
            store_shared(present, address, values[i].x, values[i].y, values[i].z, values[i].w);
          }
        }
      } else {
        constexpr int kChannels = Traits::kKBlock;
        uint32_t values[kAtOnce][kChannels];
        if (kPairs && odd) {
#pragma unroll
          for (int c = 0; c < kChannels; ++c) {
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
              auto const* const pair = reinterpret_cast<uint16_t const*>(
                  source + c * channel_bytes + offsets[first + i]);
              values[i][c] = pair[0] | uint32_t(pair[1]) << 16;
            }
          }
        } else {
#pragma unroll
          for (int c = 0; c < kChannels; ++c) {
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
              values[i][c] = *reinterpret_cast<uint32_t const*>(source + c * channel_bytes +
                                                                offsets[first + i]);
            }
          }
        }
        if (first == 0) ready();
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          int const staged = staged_position(first + i);
          uint32_t const address = target + uint32_t(staged) * 16;
          bool const present = staged < p.staged_positions;
          if constexpr (kPairs) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                // Every second four lanes store their second position first: eight lanes then touch
                // all banks once.
                int const second = threadIdx.x / 4 % 2 ^ e;
                uint32_t words[4];
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                  words[k] =
                      __byte_perm(values[i][half * 8 + 2 * k], values[i][half * 8 + 2 * k + 1],
                                  second == 0 ? 0x5410 : 0x7632);
                }
                store_shared(present, address + half * plane + second * 16, words[0], words[1],
                             words[2], words[3]);
              }
            }
          } else {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              float const piece[4] = {__uint_as_float(values[i][half * 4]),
                                      __uint_as_float(values[i][half * 4 + 1]),
                                      __uint_as_float(values[i][half * 4 + 2]),
                                      __uint_as_float(values[i][half * 4 + 3])};
              stage_piece<Traits, true>(present, address + half * plane, small, piece);
            }
          }
        }
      }
    }
  }
};

}  // namespace fusedconv::conv::sm90
