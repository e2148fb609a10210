// What becomes of accumulators whose rows are columns of a block, output channels, and whose
// columns are positions: a lane has two channels of its own, and all that adds over positions stays
// within four lanes.
#pragma once

#include <cstdint>

#include "conv/activate.hpp"
#include "conv/round_each.hpp"
#include "conv/sm90/boxes/columns.hpp"
#include "conv/sm90/boxes/copies.hpp"
#include "conv/sm90/boxes/linear.hpp"
#include "conv/sm90/boxes/params.hpp"
#include "conv/sm90/boxes/traits.hpp"
#include "cuda/async.hpp"
#include "cuda/early.hpp"
#include "cuda/math.hpp"
#include "cuda/pair.hpp"
#include "cuda/store_shared.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "fusedconv/activation.hpp"
#include "groupnorm/moments.hpp"

namespace fusedconv::conv::sm90::boxes {

inline constexpr int kLineSums = 4;  // of a lane and a line of eight positions
inline constexpr int kOwnRows = 2;   // of a lane: lane / 4 of its warp's 16, and that plus 8
inline constexpr int kLinesTogether = 4;

// Sum 4 l + 2 r + e is of line l, row r and position lane % 4 * 2 + e of the line.
template <class Traits>
using LineSums = float[Traits::kLines * kLineSums];

// Of a slab's box what is of the image.
struct Extent {
  int lines, columns;

  __device__ __forceinline__ Extent(Params const& p, Slab const& slab)
      : lines(min(p.box[1], p.least_outputs[1] - slab.origin[1])),
        columns(min(p.box[2], p.least_outputs[2] - slab.origin[2])) {}

  __device__ __forceinline__ bool whole(Params const& p) const {
    return lines == p.box[1] && columns == p.box[2];
  }
};

// body(sum, line, row, e) for those of lines of the image, and some behind.
template <int kSums, class Body>
__device__ __forceinline__ void for_each_line_sum(float (&sums)[kSums], int lines,
                                                  Body const& body) {
#pragma unroll
  for (int first = 0; first < kSums / kLineSums; first += kLinesTogether) {
    if (first >= lines) break;
#pragma unroll
    for (int i = first * kLineSums; i < (first + kLinesTogether) * kLineSums; ++i) {
      body(sums[i], i / kLineSums, i / 2 % 2, i % 2);
    }
  }
}

// A lane's channels, and what is added to them and multiplied in all tiles.
template <class Traits>
class OwnRows {
 public:
  __device__ __forceinline__ OwnRows(Params const& p, Block const& block, Consumer const& self) {
    if (p.scale != nullptr || p.shift != nullptr) device::wait_for_launch_in_front();
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) {
      channel_[r] = block.channel + self.warp * kWarpRows + self.lane / 4 + 8 * r;
      float bias = 0.0f, scale = 1.0f, shift = 0.0f;
      if (channel_[r] < p.own_channels) {
        using T = typename Traits::Element;
        if (p.bias != nullptr) bias = device::to_float(static_cast<T const*>(p.bias)[channel_[r]]);
        if (p.scale != nullptr) scale = p.scale[channel_[r]];
        if (p.shift != nullptr) shift = p.shift[channel_[r]];
      }
      rescales_ = p.scale != nullptr || (p.saves && p.shift != nullptr);
      first_[r] = p.saves ? bias : rescales_ ? 0.0f : bias + shift;
      scale_[r] = scale;
      shift_[r] = p.saves ? shift : fmaf(bias, scale, shift);
    }
  }

  __device__ __forceinline__ int channel(int row) const { return channel_[row]; }

  // What products are added to: the bias, where nothing is multiplied before it.
  __device__ __forceinline__ void begin(LineSums<Traits>& sums) const {
#pragma unroll
    for (int i = 0; i < Traits::kLines * kLineSums; ++i) sums[i] = first_[i / 2 % 2];
  }
  // Of the output: from sums, or from what is saved of them.
  __device__ __forceinline__ void scale_and_shift(LineSums<Traits>& sums, int lines) const {
    if (!rescales_) return;
    for_each_line_sum(sums, lines,
                      [&](float& sum, int, int r, int) { sum = fmaf(sum, scale_[r], shift_[r]); });
  }
  __device__ __forceinline__ void normalize_groups(Params const& p, int sample,
                                                   LineSums<Traits>& sums, int lines) const {
    Normalizing own[kOwnRows];
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) {
      if (channel_[r] < p.own_channels) own[r] = normalizing_map(p, sample, channel_[r]);
    }
    for_each_line_sum(sums, lines, [&](float& sum, int, int r, int) {
      sum = fmaf(sum - own[r].mean, own[r].scale, own[r].shift);
    });
  }

 private:
  bool rescales_;
  int channel_[kOwnRows];
  float first_[kOwnRows], scale_[kOwnRows], shift_[kOwnRows];
};

// By shared memory, transposed to pixels of the block's columns, and one tensor copy.
template <class Traits>
__device__ __forceinline__ void store_lines(Params const& p, Maps const& maps, Result result,
                                            Block const& block, Slab const& slab,
                                            Consumer const& self, LineSums<Traits> const& sums,
                                            int lines, unsigned char* staged) {
  using T = typename Traits::Element;
  finish_copies(self);
  // Eight rows of eight positions are a matrix, whose positions eight lanes have the addresses of:
  // of a line's first eight rows, of its next eight, and of those of the next line.
  int const position = self.lane % 8, unit = self.warp * 2 + self.lane / 8 % 2;
  uint32_t const own = device::shared_address(staged) +
                       (self.lane / 16 * kHaloLine + position) * kChunkBytes +
                       (unit ^ position) * 16;
#pragma unroll
  for (int first = 0; first < Traits::kLines; first += kLinesTogether) {
    if (first >= lines) break;
#pragma unroll
    for (int line = first; line < first + kLinesTogether; line += 2) {
      auto const pair = [&](int i) {
        float const* const at = sums + line * kLineSums + 2 * i;
        return device::Pack<T, 2>::of({at[0], at[1]}).bits[0];
      };
      device::store_matrices_transposed(own + line * kHaloLine * kChunkBytes,
                                        {pair(0), pair(1), pair(2), pair(3)});
    }
  }
  device::fence_async_proxy();
  self.sync();
  if (self.thread == 0) {
    CUtensorMap const* const to = result == Result::kSaved ? maps.saved : maps.writes;
    cute::SM90_TMA_STORE_5D::copy(to, staged, block.channel, slab.origin[2], slab.origin[1],
                                  slab.origin[0], slab.sample);
    device::commit_stores();
  }
}

// Leaves the moments of each channel's values in the slab's slot of p.partials: sums about a pivot,
// the value at the slab's first position, so that a large mean costs no precision. What is no pixel
// becomes the pivot.
template <class Traits>
__device__ __forceinline__ void leave_line_moments(Params const& p, Block const& block,
                                                   Slab const& slab, Extent const& extent,
                                                   Consumer const& self,
                                                   OwnRows<Traits> const& rows,
                                                   LineSums<Traits>& sums) {
  float pivots[kOwnRows], totals[kOwnRows] = {}, squares[kOwnRows] = {};
#pragma unroll
  for (int r = 0; r < kOwnRows; ++r) {
    float const first = __shfl_sync(~0u, sums[2 * r], self.lane & ~3);
    pivots[r] = isfinite(first) ? first : 0.0f;
  }
  if (!extent.whole(p)) {
    int const own_columns = extent.columns - self.lane % 4 * 2;
    for_each_line_sum(sums, extent.lines, [&](float& sum, int line, int r, int e) {
      sum = line < extent.lines && e < own_columns ? sum : pivots[r];
    });
  }
  for_each_line_sum(sums, extent.lines, [&](float& sum, int, int r, int) {
    float const deviation = sum - pivots[r];
    totals[r] += deviation;
    squares[r] = fmaf(deviation, deviation, squares[r]);
  });
  float const count = float(extent.lines * extent.columns);
#pragma unroll
  for (int r = 0; r < kOwnRows; ++r) {
#pragma unroll
    for (int lanes = 1; lanes <= 2; lanes *= 2) {
      totals[r] += __shfl_xor_sync(~0u, totals[r], lanes);
      squares[r] += __shfl_xor_sync(~0u, squares[r], lanes);
    }
    if (self.lane % 4 != r || rows.channel(r) >= p.output_channels) continue;
    p.partials[(int64_t(slab.number) * p.sets + block.set) * p.output_channels + rows.channel(r)] =
        device::shifted_moments(count, pivots[r], totals[r], squares[r]).partial();
  }
}

// The results of a slab.
template <class Traits, Extra kExtra>
__device__ __forceinline__ void finish_rows(Params const& p, Maps const& maps, Block const& block,
                                            Slab const& slab, Extent const& extent,
                                            Consumer const& self, OwnRows<Traits> const& rows,
                                            LineSums<Traits>& sums, unsigned char* staged) {
  using T = typename Traits::Element;
  int const lines = extent.lines;
  auto const store = [&](Result result) {
    store_lines<Traits>(p, maps, result, block, slab, self, sums, lines, staged);
  };
  auto const activate = [&] {
    if (p.activation == Activation::kIdentity) return;
    dispatch_activation(p.activation, [&](auto form) {
      using Form = decltype(form);
      for_each_line_sum(sums, lines, [](float& sum, int, int, int) {
        sum = kExtra == Extra::kTakesMoments ? device::quick_value<Form>(sum)
                                             : last_activated<T, Form>(sum);
      });
    });
  };
  if constexpr (kExtra == Extra::kTakesMoments) {
    rows.scale_and_shift(sums, lines);
    if (p.stores && !p.activates_output) {
      round_each<T>(sums);  // moments are of what is computed from what is stored
      store(Result::kOutput);
    }
    activate();
    bool const stores = p.stores && p.activates_output;
    if (stores) round_each<T>(sums);
    leave_line_moments<Traits>(p, block, slab, extent, self, rows, sums);
    if (stores) store(Result::kOutput);
  } else {
    if (p.saves) {
      round_each<T>(sums);
      store(Result::kSaved);
    }
    rows.scale_and_shift(sums, lines);
    if (p.group.statistics != nullptr) rows.normalize_groups(p, slab.sample, sums, lines);
    activate();
    store(Result::kOutput);
  }
}

}  // namespace fusedconv::conv::sm90::boxes
