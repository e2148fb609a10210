// What a lane has of the products, and its moments.
#pragma once

#include "conv/few/schedule.hpp"
#include "cuda/math.hpp"

namespace fusedconv::conv::few {

// Of four channels of a lane: kSlots of two halves of a block's channels, 2 t and 2 t + 1 of each.
inline constexpr int kSlots = 4;
__device__ __forceinline__ int channel_of(int slot, int lane) {
  return slot / 2 * 8 + lane % 4 * 2 + slot % 2;
}

// Two quotients of a lane: g of the sixteen and one as far behind it as this.
inline constexpr int kHigh = kQuotients / 2;

// Sixteen quotients of a line of outputs: sums by the parity along width, the half of the channels,
// and as the instruction has them.
struct Sums {
  float values[2][2][4];

  __device__ __forceinline__ float& at(int slot, int high, int parity) {
    return values[parity][slot / 2][high * 2 + slot % 2];
  }
  template <class Body>
  __device__ __forceinline__ void each(Body const& body) {
#pragma unroll
    for (int i = 0; i < 16; ++i) body((&values[0][0][0])[i]);
  }
};

// A lane's outputs along width: x and the next one, and two as far behind them as kHigh quotients.
struct Columns {
  int x, width;

  __device__ __forceinline__ bool has(int high, int parity) const {
    return x + high * kHigh * kStride + parity < width;
  }
};

// Sums about a shift that lanes of the same channels have in common: one of their values.
struct LaneMoments {
  float shift[kSlots] = {}, sum[kSlots] = {}, squares[kSlots] = {};
  int count = 0;  // of each

  __device__ __forceinline__ void begin(Sums& sums) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      shift[i] = __shfl_sync(~0u, sums.at(i, 0, 0), int(threadIdx.x) % 4);
    }
  }

  // kWhole: the line has all of these outputs.
  template <bool kWhole>
  __device__ __forceinline__ void add(Sums& sums, Columns const& columns) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      int const high = j / 2, parity = j % 2;
      bool const present = kWhole || columns.has(high, parity);
#pragma unroll
      for (int i = 0; i < kSlots; ++i) {
        float const deviation = present ? sums.at(i, high, parity) - shift[i] : 0.0f;
        sum[i] += deviation;
        squares[i] = fmaf(deviation, deviation, squares[i]);
      }
      count += present;
    }
  }
};

}  // namespace fusedconv::conv::few
