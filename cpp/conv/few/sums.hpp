// What a lane has of the products, and its moments.
#pragma once

#include "conv/few/schedule.hpp"
#include "cuda/math.hpp"

namespace fusedconv::conv::few {

// A lane's channels are neighbours, so that those of a slot lie a multiple of two apart and their
// lines begin at places that are all even or all odd.
__device__ __forceinline__ int channel_of(int slot, int lane) { return lane / 4 * kSlots + slot; }

// Sixteen quotients of a line of outputs: sums by the parity along width, the group of quotients,
// and as the instruction has them. A lane's run is of four quotients, two in each group.
struct Sums {
  float values[2][kGroups][4];

  __device__ __forceinline__ float& at(int slot, int i) {
    return values[i % 2][i / 4][slot * 2 + i / 2 % 2];
  }
  template <class Body>
  __device__ __forceinline__ void each(Body const& body) {
#pragma unroll
    for (int i = 0; i < kSlots * kRun; ++i) body((&values[0][0][0])[i]);
  }
};

// Sums about a shift that lanes of the same channels have in common: one of their values.
struct LaneMoments {
  float shift[kSlots] = {}, sum[kSlots] = {}, squares[kSlots] = {};
  int count = 0;  // of each

  __device__ __forceinline__ void begin(Sums& sums) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      shift[i] = __shfl_sync(~0u, sums.at(i, 0), int(threadIdx.x) % kWarp & ~3);
    }
  }

  // rest: outputs that the line has from the lane's first on. kWhole: all of these.
  template <bool kWhole>
  __device__ __forceinline__ void add(Sums& sums, int rest) {
#pragma unroll
    for (int j = 0; j < kRun; ++j) {
      bool const present = kWhole || j < rest;
#pragma unroll
      for (int i = 0; i < kSlots; ++i) {
        float const deviation = sums.at(i, j) - shift[i];
        if (present) {
          sum[i] += deviation;
          squares[i] = fmaf(deviation, deviation, squares[i]);
        }
      }
    }
    count += kWhole ? kRun : max(0, min(kRun, rest));
  }
};

}  // namespace fusedconv::conv::few
