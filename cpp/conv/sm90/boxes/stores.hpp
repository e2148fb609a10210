// Storing by shared memory and tensor copies.
#pragma once

#include <cstdint>
#include <type_traits>

#include "conv/sm90/boxes/columns.hpp"
#include "conv/sm90/boxes/copies.hpp"
#include "cuda/async.hpp"
#include "cuda/math.hpp"
#include "cute/arch/copy_sm90_tma.hpp"

namespace fusedconv::conv::sm90::boxes {

// Copies of lines of 32, 64 or 128 bytes find their 16-byte units exchanged by bits of the lines'
// number, where `mask` is a line's units less one.
template <class Pack>
__device__ __forceinline__ void store_swizzled(unsigned char* staged, uint32_t at, uint32_t mask,
                                               Pack const& pack) {
  at ^= (at >> 7 & mask) << 4;
  pack.store(
      reinterpret_cast<std::remove_const_t<std::remove_reference_t<decltype(pack.values[0])>>*>(
          staged + at));
}

// Channels last: where a portion's columns of a row lie so that tensor copies of 2^store_shift
// columns each take them.
template <class Traits>
class PixelRow {
 public:
  // bytes: of the columns that the lane is ahead, fewer than kGranule, which at()'s are multiples
  // of, so that they share no bits.
  __device__ __forceinline__ PixelRow(Params const& p, uint32_t row, uint32_t bytes)
      : row_bytes_(uint32_t(Traits::kElementBytes) << p.store_shift),
        own_((row * row_bytes_ + bytes) ^ (row * row_bytes_ >> 7 & (row_bytes_ / 16 - 1)) << 4) {}

  // Of a column so many bytes on. Units are exchanged within a row's copy, by bits of its address.
  __device__ __forceinline__ uint32_t at(uint32_t column) const {
    uint32_t const within = column & (row_bytes_ - 1);
    return (own_ ^ within) + kSlab * (column - within);
  }
  // Eight rows on, units are exchanged alike.
  __device__ __forceinline__ uint32_t eight_rows() const { return 8 * row_bytes_; }

 private:
  uint32_t row_bytes_, own_;
};

// A portion's sums: sum_of(their number in it).
template <class Traits, class SumOf>
__device__ __forceinline__ void stage_pixels(Params const& p, Consumer const& self,
                                             SumOf const& sum_of, unsigned char* staged) {
  using T = typename Traits::Element;
  constexpr int kEightBytes = 8 * Traits::kElementBytes;
  auto const pair = [&](int j, int half) {
    int const index = j * 4 + half * 2;
    return device::Pack<T, 2>::of({sum_of(index), sum_of(index + 1)});
  };
  int const warp_row = self.warp * kWarpRows;
  if constexpr (sizeof(T) == 2) {
    // Eight columns of eight rows are a matrix, whose rows eight lanes have the addresses of: of
    // eight rows, of the eight below, and of the next eight columns of both.
    PixelRow<Traits> const row(p, warp_row + self.lane % 16, 0);
    uint32_t const base = device::shared_address(staged);
#pragma unroll
    for (int j = 0; j < Traits::kPortion / 8; j += 2) {
      device::store_matrices(
          base + row.at((j + self.lane / 16) * kEightBytes),
          {pair(j, 0).bits[0], pair(j, 1).bits[0], pair(j + 1, 0).bits[0], pair(j + 1, 1).bits[0]});
    }
  } else {
    PixelRow<Traits> const row(p, warp_row + self.lane / 4,
                               self.lane % 4 * 2 * Traits::kElementBytes);
#pragma unroll
    for (int j = 0; j < Traits::kPortion / 8; ++j) {
      uint32_t const at = row.at(j * kEightBytes);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        pair(j, half).store(reinterpret_cast<T*>(staged + at + half * row.eight_rows()));
      }
    }
  }
}

// The copies of a portion of columns, by one thread.
template <class Traits>
__device__ __forceinline__ void store_pixels(Params const& p, Maps const& maps, Result result,
                                             Block const& block, Slab const& slab, int portion,
                                             unsigned char const* staged) {
  for (int column = 0; column < Traits::kPortion; column += 1 << p.store_shift) {
    ColumnPlace const at(p, block, portion * Traits::kPortion + column);
    if (!at.present) continue;
    CUtensorMap const* const phase =
        result == Result::kSaved ? &maps.saved[at.phase] : &maps.writes[at.phase];
    cute::SM90_TMA_STORE_5D::copy(phase, staged + column * kSlab * Traits::kElementBytes,
                                  at.channel, slab.origin[2], slab.origin[1], slab.origin[0],
                                  slab.sample);
  }
}

// Channels first, where the segments are the phases along width: a portion has all of them of its
// channels, side by side. Copies take 2^piece_shift positions of each of the slab's lines.
template <class Traits, int kPortionIndex>
__device__ __forceinline__ void stage_planes(Params const& p, Consumer const& self,
                                             Sums<Traits>& sums, unsigned char* staged) {
  using T = typename Traits::Element;
  constexpr int kPixelBytes = Traits::kSegments * Traits::kElementBytes;  // of a position
  constexpr int kChannels = Traits::kPlaneColumns / Traits::kSegments;
  constexpr int kPortionBytes = Traits::kPlanePortions * Memory::kPortionBytes;
  constexpr int first = kPortionIndex * kChannels / 2;
  int const line_bytes = kPixelBytes << p.piece_shift;
  uint32_t const mask = line_bytes > kChunkBytes ? 0 : uint32_t(line_bytes) / 16 - 1;
  int const lines = p.box[0] * p.box[1];  // of a sample
  int const pieces = p.box[2] >> p.piece_shift;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int rest, column, sample, line;
    p.box_w(rest, column, self.warp * kWarpRows + self.lane / 4 + half * 8);
    p.box_lines(sample, line, rest);
    if (sample >= p.box[kMaxAxes]) continue;
    int const piece = column >> p.piece_shift;
    int const within = column - (piece << p.piece_shift);
    uint32_t const start = piece * (kPortionBytes / pieces) + within * kPixelBytes +
                           (sample * kChannels * lines + line) * line_bytes;
#pragma unroll
    for (int j = 0; j < kChannels / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        int const channel = j * 8 + self.lane % 4 * 2 + e;
        float values[Traits::kSegments];
#pragma unroll
        for (int i = 0; i < Traits::kSegments; ++i) {
          values[i] = sum_of<Traits>(sums, i, first + j * 4 + half * 2 + e);
        }
        uint32_t const at = start + channel * lines * line_bytes;
        store_swizzled(staged, at, mask, device::Pack<T, Traits::kSegments>::of(values));
      }
    }
  }
}

template <class Traits>
__device__ __forceinline__ void store_planes(Params const& p, Maps const& maps, Result result,
                                             Block const& block, Slab const& slab, int portion,
                                             unsigned char const* staged) {
  constexpr int kChannels = Traits::kPlaneColumns / Traits::kSegments;
  constexpr int kPortionBytes = Traits::kPlanePortions * Memory::kPortionBytes;
  int const channel = block.channel + portion * kChannels;
  if (channel >= p.output_channels) return;
  int const pieces = p.box[2] >> p.piece_shift;
  CUtensorMap const* const set =
      result == Result::kSaved ? &maps.saved[block.set] : &maps.writes[block.set];
  for (int piece = 0; piece < pieces; ++piece) {
    cute::SM90_TMA_STORE_5D::copy(set, staged + piece * (kPortionBytes / pieces),
                                  (slab.origin[2] + (piece << p.piece_shift)) * Traits::kSegments,
                                  slab.origin[1], slab.origin[0], channel, slab.sample);
  }
}

template <class Traits, bool kChannelsLast, int kPortionIndex>
__device__ __forceinline__ void stage(Params const& p, Consumer const& self, Sums<Traits>& sums,
                                      unsigned char* staged) {
  if constexpr (kChannelsLast) {
    auto const sum_of = [&](int index) {
      return sum_at<Traits>(sums, kPortionIndex * Traits::kPortion / 2 + index);
    };
    stage_pixels<Traits>(p, self, sum_of, staged);
  } else {
    stage_planes<Traits, kPortionIndex>(p, self, sums, staged);
  }
}

template <class Traits, bool kChannelsLast, int kPortionIndex = 0>
__device__ __forceinline__ void store_portions(Params const& p, Maps const& maps, Result result,
                                               Block const& block, Slab const& slab,
                                               Consumer const& self, Sums<Traits>& sums,
                                               unsigned char* staged) {
  constexpr int kPortions = kChannelsLast ? 1 : Traits::kPlanePortions;  // that are one
  constexpr int kAll = Traits::kColumns / (kPortions * Traits::kPortion);
  constexpr int kStaged = Traits::kShape.staged_portions() / kPortions;
  // Between barriers: all, where the memory holds them and other consumers have products meanwhile.
  constexpr int kTogether = Traits::kStationary && kStaged >= kAll ? kAll : 1;
  if constexpr (kPortionIndex < kAll) {
    auto const own = [&](int portion) {
      return staged + portion % kStaged * kPortions * Memory::kPortionBytes;
    };
    static_assert(kTogether <= 2, "two portions are staged below");
    // The copies of the portions that lay here have read them.
    if (self.thread == 0) device::wait_stores_read<kStaged / kTogether - 1>();
    self.sync();
    stage<Traits, kChannelsLast, kPortionIndex>(p, self, sums, own(kPortionIndex));
    if constexpr (kTogether == 2) {
      stage<Traits, kChannelsLast, kPortionIndex + 1>(p, self, sums, own(kPortionIndex + 1));
    }
    device::fence_async_proxy();
    self.sync();
    if (self.thread == 0) {
      for (int portion = kPortionIndex; portion < kPortionIndex + kTogether; ++portion) {
        if constexpr (kChannelsLast) {
          store_pixels<Traits>(p, maps, result, block, slab, portion, own(portion));
        } else {
          store_planes<Traits>(p, maps, result, block, slab, portion, own(portion));
        }
      }
      device::commit_stores();
    }
    store_portions<Traits, kChannelsLast, kPortionIndex + kTogether>(p, maps, result, block, slab,
                                                                     self, sums, staged);
  }
}

template <class Traits>
__device__ __forceinline__ void store(Params const& p, Maps const& maps, Result result,
                                      Block const& block, Slab const& slab, Consumer const& self,
                                      Sums<Traits>& sums, unsigned char* staged) {
  if constexpr (Traits::kSegments > 1) {
    if (Traits::kPlanes || Traits::kAlike > 1 || !p.channels_last) {
      return store_portions<Traits, false>(p, maps, result, block, slab, self, sums, staged);
    }
  }
  if constexpr (!Traits::kPlanes && Traits::kAlike == 1) {
    store_portions<Traits, true>(p, maps, result, block, slab, self, sums, staged);
  }
}

}  // namespace fusedconv::conv::sm90::boxes
