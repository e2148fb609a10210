// The raster on the device: where its positions lie among the output's pixels.
#pragma once

#include <cstdint>

#include "conv/problem.hpp"
#include "conv/sm90/schedule.hpp"
#include "cutlass/fast_math.h"

namespace fusedconv::conv::sm90 {

struct Raster {
  cutlass::FastDivmod pitch_w, pitch_h;
  int block_n;
  int z, p, q;
  int strip_width, positions;
  bool linear;
  int warpgroup_tiles, strip_warpgroup_tiles;

  static Raster of(ConvProblem const& c, Schedule const& s) {
    return {.pitch_w = cutlass::FastDivmod(s.pitch_w),
            .pitch_h = cutlass::FastDivmod(s.pitch_h),
            .block_n = s.block_n,
            .z = c.z,
            .p = c.p,
            .q = c.q,
            .strip_width = s.strip_width,
            .positions = s.positions,
            .linear = s.linear,
            .warpgroup_tiles = s.warpgroup_tiles,
            .strip_warpgroup_tiles = s.warpgroup_tiles / s.strips};
  }
};

// Eight neighbouring positions of a tile, as one or two runs of output pixels: positions before
// `border` are valid up to `valid_a` and lie from pixel `a` on, those behind up to `valid_b`, from
// `b`.
struct Octet {
  int a, valid_a, b, valid_b, border;

  Octet() = default;
  __device__ __forceinline__ Octet(Raster const& p, int strip, int position) {
    b = 0;
    valid_b = 0;
    border = 8;
    if (p.linear) {
      a = position;
      valid_a = min(8, p.positions - position);
      return;
    }
    int const column0 = strip * p.strip_width;
    int const width = min(p.strip_width, p.q - column0);
    int row, column, slice;
    p.pitch_w(row, column, position);
    int const next = row + 1;
    p.pitch_h(slice, row, row);
    bool const inside = row < p.p && slice < p.z;
    border = min(8, p.pitch_w.divisor - column);
    a = (slice * p.p + row) * p.q + column0 + column;
    valid_a = inside ? min(border, width - column) : 0;
    if (border < 8) {
      p.pitch_h(slice, row, next);
      b = (slice * p.p + row) * p.q + column0 - border;
      valid_b = row < p.p && slice < p.z ? min(8, width + border) : 0;
    }
  }
  __device__ __forceinline__ bool valid_either(int k) const {
    return k < (k >= border ? valid_b : valid_a);
  }
  __device__ __forceinline__ int pixel(int k) const { return (k >= border ? b : a) + k; }
  // Lane j of the warp holds octet j. How many positions of the lane's two columns are valid.
  template <int kOctets>
  __device__ __forceinline__ int count_of_columns() const {
    uint32_t counts = 0;  // at most 64 for each of four pairs of columns
    if (threadIdx.x % 32 < kOctets) {
#pragma unroll
      for (int k = 0; k < 8; ++k) counts += uint32_t(valid_either(k)) << (k / 2 * 8);
    }
    counts = __reduce_add_sync(~0u, counts);
    return int(counts >> (threadIdx.x % 4 * 8) & 0xff);
  }
  template <bool kWraps>
  __device__ __forceinline__ Octet broadcast(int lane) const {
    Octet result(*this);
    result.valid_a = __shfl_sync(~0u, valid_a, lane);
    if constexpr (kWraps) {
      result.valid_b = __shfl_sync(~0u, valid_b, lane);
      result.border = __shfl_sync(~0u, border, lane);
    }
    return result;
  }
  template <bool kWraps>
  __device__ __forceinline__ bool valid(int k) const {
    return k < (kWraps && k >= border ? valid_b : valid_a);
  }
};

}  // namespace fusedconv::conv::sm90
