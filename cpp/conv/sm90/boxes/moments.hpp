// Moments of each channel of a consumer's slab, for GroupNorm behind the convolution.
//
// All are sums about a pivot, the value at the slab's first position, so that a large mean costs no
// precision: a thread's, then a warp's by exchanging halves of what lanes have, then the consumer's
// in shared memory. Where a set's first phase has no pixel there, the pivot lies beside the image.
#pragma once

#include <cstdint>

#include "conv/sm90/boxes/columns.hpp"
#include "conv/sm90/boxes/params.hpp"
#include "conv/sm90/boxes/traits.hpp"
#include "groupnorm/moments.hpp"

namespace fusedconv::conv::sm90::boxes {

// What a consumer has of shared memory while it takes moments.
template <class Traits>
struct MomentSums {
  static constexpr int kColumns = Traits::kSegmentColumns;
  float pivots[kColumns];
  float2 by_warp[kWarpgroupWarps][kColumns];  // sums and squares
  float counts[kWarpgroupWarps][kMostPhases];
};

// Of the two rows that a lane has, which are pixels of which phases of a set: bit 2 f + half.
__device__ __forceinline__ uint32_t pixels_of_rows(Params const& p, Block const& block,
                                                   Slab const& slab, Consumer const& self) {
  uint32_t result = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int lines, w, line, sample;
    p.box_w(lines, w, self.warp * kWarpRows + self.lane / 4 + half * 8);
    p.box_lines(sample, line, lines);
    int const d = line / p.box[1];
    int const position[kMaxAxes] = {slab.origin[0] + d, slab.origin[1] + line - d * p.box[1],
                                    slab.origin[2] + w};
    for (int f = 0; f < p.set_phases[block.set]; ++f) {
      int const* const outputs = p.outputs[p.first_phase[block.set] + f];
      bool const inside = sample == 0 && position[0] < outputs[0] && position[1] < outputs[1] &&
                          position[2] < outputs[2];
      result |= uint32_t(inside) << (2 * f + half);
    }
  }
  return result;
}

// Whether all rows are pixels of all phases that the columns have room for.
template <class Traits>
__device__ __forceinline__ bool has_all_pixels(Params const& p, Block const& block,
                                               Slab const& slab) {
  bool result = p.positions == kSlab;
#pragma unroll
  for (int a = 0; a < kMaxAxes; ++a) {
    result = result && slab.origin[a] + p.box[a] <= p.least_outputs[a];
  }
  return result && (Traits::kSegments == 1 || p.set_phases[block.set] == Traits::kSegments);
}

// Adds kCount values of the eight lanes that share a warp's columns, each lane leaving with those
// of its own share: kCount / 8 of them, or one of which others have copies.
template <int kCount, int kLanes = 16>
__device__ __forceinline__ void add_over_rows(float (&values)[kCount], int lane, int& first) {
  if constexpr (kLanes >= 4) {
    if constexpr (kCount > 1) {
      constexpr int kHalf = kCount / 2;
      bool const upper = (lane & kLanes) != 0;
      float kept[kHalf];
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        // Not by a choice of elements, which would need addresses.
        float const low = values[i], high = values[kHalf + i];
        kept[i] = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, kLanes);
      }
      if (upper) first += kHalf;
      add_over_rows<kHalf, kLanes / 2>(kept, lane, first);
#pragma unroll
      for (int i = 0; i < kHalf; ++i) values[i] = kept[i];
    } else {
      values[0] += __shfl_xor_sync(~0u, values[0], kLanes);
      add_over_rows<kCount, kLanes / 2>(values, lane, first);
    }
  }
}

// Gives what is no pixel the column's pivot, which adds nothing. It is not stored either.
template <class Traits>
__device__ __forceinline__ void leave_pixels(Params const& p, Consumer const& self, uint32_t pixels,
                                             Sums<Traits>& sums,
                                             MomentSums<Traits> const& moments) {
#pragma unroll
  for (int j = 0; j < Traits::kSegmentColumns / 8; ++j) {
#pragma unroll
    for (int segment = 0; segment < Traits::kSegments; ++segment) {
      int phase = segment;
      if constexpr (Traits::kSegments == 1) {
        int within;
        p.segments(phase, within, j * 8);
      }
      uint32_t const own = phase < kMostPhases ? pixels >> 2 * phase : 0;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float const pivot = moments.pivots[j * 8 + self.lane % 4 * 2 + e % 2];
        float& sum = sum_of<Traits>(sums, segment, j * 4 + e);
        sum = own >> e / 2 & 1 ? sum : pivot;
      }
    }
  }
}

// A warp's sums and squares of each column of a segment, over the segments; of a row with one,
// whose columns may be several phases', of each phase by itself.
template <class Traits>
__device__ __forceinline__ void add_warp_moments(Params const& p, Block const& block,
                                                 Consumer const& self, Sums<Traits>& sums,
                                                 MomentSums<Traits>& moments) {
  constexpr int kWide = 2;  // eights of columns at a time
  constexpr int kValues = 2 * kWide;
#pragma unroll
  for (int wide = 0; wide < Traits::kSegmentColumns / 8; wide += kWide) {
    if (Traits::kSegments > 1 && block.channel + wide * 8 >= p.output_channels) break;
    float totals[kValues] = {}, squares[kValues] = {};
#pragma unroll
    for (int j = 0; j < kWide; ++j) {
      float2 const pivot =
          *reinterpret_cast<float2 const*>(moments.pivots + (wide + j) * 8 + self.lane % 4 * 2);
#pragma unroll
      for (int segment = 0; segment < Traits::kSegments; ++segment) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float const deviation =
              sum_of<Traits>(sums, segment, (wide + j) * 4 + e) - (e % 2 == 0 ? pivot.x : pivot.y);
          totals[2 * j + e % 2] += deviation;
          squares[2 * j + e % 2] = fmaf(deviation, deviation, squares[2 * j + e % 2]);
        }
      }
    }
    int own = 0, same = 0;
    add_over_rows(totals, self.lane, own);
    add_over_rows(squares, self.lane, same);
    int const column = wide * 8 + own / 2 * 8 + self.lane % 4 * 2 + own % 2;
    moments.by_warp[self.warp][column] = {totals[0], squares[0]};
  }
}

// Leaves the moments of the values in `sums` in the slab's slot of p.partials. `shared` is the
// consumer's to write, with all its threads here.
template <class Traits>
__device__ __forceinline__ void leave_moments(Params const& p, Block const& block, Slab const& slab,
                                              Consumer const& self, Sums<Traits>& sums,
                                              unsigned char* shared) {
  using Moments = MomentSums<Traits>;
  static_assert(sizeof(Moments) <= Traits::kShape.staged_portions() * Memory::kPortionBytes);
  auto& moments = *reinterpret_cast<Moments*>(shared);
  if (self.warp == 0 && self.lane < 4) {
#pragma unroll
    for (int j = 0; j < Traits::kSegmentColumns / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float const value = sum_of<Traits>(sums, 0, j * 4 + e);
        moments.pivots[j * 8 + self.lane * 2 + e] = isfinite(value) ? value : 0.0f;
      }
    }
  }
  self.sync();
  int const phases = p.set_phases[block.set];
  if (has_all_pixels<Traits>(p, block, slab)) {
    if (self.lane < kMostPhases) moments.counts[self.warp][self.lane] = kWarpRows;
  } else {
    uint32_t const pixels = pixels_of_rows(p, block, slab, self);
    leave_pixels<Traits>(p, self, pixels, sums, moments);
    for (int f = 0; f < phases; ++f) {
      unsigned const own = self.lane % 4 == 0 ? __popc(pixels >> 2 * f & 3) : 0;
      unsigned const count = __reduce_add_sync(~0u, own);
      if (self.lane == 0) moments.counts[self.warp][f] = float(count);
    }
  }
  add_warp_moments<Traits>(p, block, self, sums, moments);
  self.sync();
  // Phases in segments are neighbours, added already.
  constexpr bool kApart = Traits::kSegments == 1;
  int const columns = kApart ? p.segment : Traits::kSegmentColumns;
  for (int i = self.thread; i < columns; i += kWarpgroupThreads) {
    int const channel = block.channel + i;
    if (channel >= p.output_channels) break;
    device::Moments whole;
    for (int f = 0; f < (kApart ? phases : 1); ++f) {
      float count = 0.0f, total = 0.0f, squares = 0.0f;
#pragma unroll
      for (int warp = 0; warp < kWarpgroupWarps; ++warp) {
        for (int g = f; g < (kApart ? f + 1 : phases); ++g) count += moments.counts[warp][g];
        float2 const part = moments.by_warp[warp][f * columns + i];
        total += part.x;
        squares += part.y;
      }
      if (count > 0.0f) {
        float const pivot = moments.pivots[f * columns + i];
        whole.merge(device::shifted_moments(count, pivot, total, squares));
      }
    }
    p.partials[(int64_t(slab.number) * p.sets + block.set) * p.output_channels + channel] =
        whole.partial();
  }
}

}  // namespace fusedconv::conv::sm90::boxes
