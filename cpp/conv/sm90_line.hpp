// The line of positions on the device: where its positions lie among the output's pixels.
#pragma once

#include <algorithm>

#include "conv/sm90.hpp"
#include "cutlass/fast_math.h"

namespace fusedconv::conv::sm90 {

struct Line {
  cutlass::FastDivmod pitch_w, pitch_h;
  int block_n;
  int z, p, q;
  int strip_width, positions;
  bool linear;
  int stat_tiles, strip_stat_tiles;

  static Line of(ConvProblem const& c, Schedule const& s) {
    return {.pitch_w = cutlass::FastDivmod(s.pitch_w),
            .pitch_h = cutlass::FastDivmod(s.pitch_h),
            .block_n = s.block_n,
            .z = c.z,
            .p = c.p,
            .q = c.q,
            .strip_width = s.strip_width,
            .positions = s.positions,
            .linear = s.linear,
            .stat_tiles = s.stat_tiles,
            .strip_stat_tiles = s.stat_tiles / s.strips};
  }
};

#if defined(__CUDACC__)

// Eight neighbouring positions of a tile, as one or two runs of output pixels: positions before
// `border` are valid up to `valid_a` and lie from pixel `a` on, those behind up to `valid_b`, from `b`.
struct Group {
  int a, valid_a, b, valid_b, border;

  Group() = default;
  __device__ __forceinline__ Group(Line const& p, int strip, int position) {
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
    int line, column, slice;
    p.pitch_w(line, column, position);
    int const next = line + 1;
    p.pitch_h(slice, line, line);
    bool const inside = line < p.p && slice < p.z;
    border = min(8, p.pitch_w.divisor - column);
    a = (slice * p.p + line) * p.q + column0 + column;
    valid_a = inside ? min(border, width - column) : 0;
    if (border < 8) {
      p.pitch_h(slice, line, next);
      b = (slice * p.p + line) * p.q + column0 - border;
      valid_b = line < p.p && slice < p.z ? min(8, width + border) : 0;
    }
  }
  __device__ __forceinline__ bool valid_either(int k) const {
    return k < (k >= border ? valid_b : valid_a);
  }
  __device__ __forceinline__ int pixel(int k) const { return (k >= border ? b : a) + k; }
  // Lane j of the warp holds group j. How many positions of the lane's two columns are valid.
  template <int kGroups>
  __device__ __forceinline__ int count_of_columns() const {
    uint32_t counts = 0;  // at most 64 for each of four pairs of columns
    if (threadIdx.x % 32 < kGroups) {
#pragma unroll
      for (int k = 0; k < 8; ++k) counts += uint32_t(valid_either(k)) << (k / 2 * 8);
    }
    counts = __reduce_add_sync(~0u, counts);
    return int(counts >> (threadIdx.x % 4 * 8) & 0xff);
  }
  template <bool kWraps>
  __device__ __forceinline__ Group broadcast(int lane) const {
    Group result(*this);
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

#endif  // __CUDACC__

}  // namespace fusedconv::conv::sm90
