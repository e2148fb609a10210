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

// Channels last: puts the columns of a portion where tensor copies of 2^store_shift each take them.
template <class Traits, int kPortionIndex>
__device__ __forceinline__ void stage_pixels(Params const& p, Consumer const& self,
                                             Sums<Traits>& sums, unsigned char* staged) {
  using T = typename Traits::Element;
  constexpr int first = kPortionIndex * Traits::kPortion / 2;
  int const row_bytes = Traits::kElementBytes << p.store_shift;
  uint32_t const mask = uint32_t(row_bytes) / 16 - 1;
  int const row = self.warp * kWarpRows + self.lane / 4;
#pragma unroll
  for (int j = 0; j < Traits::kPortion / 8; ++j) {
    int const column = j * 8 + self.lane % 4 * 2;
    int const copy = column >> p.store_shift;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      device::Pack<T, 2> pair;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        pair.values[e] = device::from_float<T>(sum_at<Traits>(sums, first + j * 4 + half * 2 + e));
      }
      uint32_t const at = uint32_t(copy * kSlab + row + half * 8) * row_bytes +
                          (column - (copy << p.store_shift)) * Traits::kElementBytes;
      store_swizzled(staged, at, mask, pair);
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
        result == Result::kSaved ? &maps.saved[at.phase] : &maps.parts[at.phase];
    cute::SM90_TMA_STORE_5D::copy(p.gathers ? &maps.whole : phase,
                                  staged + column * kSlab * Traits::kElementBytes, at.channel,
                                  slab.origin[2], slab.origin[1], slab.origin[0], slab.sample);
  }
}

// Channels first, where the segments are the phases along width: a portion has all of them of its
// channels, side by side. Copies take 2^piece_shift positions of each of the slab's lines.
template <class Traits, int kPortionIndex>
__device__ __forceinline__ void stage_planes(Params const& p, Consumer const& self,
                                             Sums<Traits>& sums, unsigned char* staged) {
  using T = typename Traits::Element;
  constexpr int kPixelBytes = Traits::kSegments * Traits::kElementBytes;  // of a position
  constexpr int kChannels = Traits::kPortion / Traits::kSegments;
  constexpr int first = kPortionIndex * kChannels / 2;
  int const line_bytes = kPixelBytes << p.piece_shift;
  uint32_t const mask = uint32_t(line_bytes) / 16 - 1;
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
    uint32_t const start = piece * (Memory::kPortionBytes / pieces) + within * kPixelBytes +
                           (sample * kChannels * lines + line) * line_bytes;
#pragma unroll
    for (int j = 0; j < kChannels / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        int const channel = j * 8 + self.lane % 4 * 2 + e;
        device::Pack<T, Traits::kSegments> pixels;
#pragma unroll
        for (int i = 0; i < Traits::kSegments; ++i) {
          pixels.values[i] = device::from_float<T>(sums[i][first + j * 4 + half * 2 + e]);
        }
        uint32_t const at = start + channel * lines * line_bytes;
        store_swizzled(staged, at, mask, pixels);
      }
    }
  }
}

template <class Traits>
__device__ __forceinline__ void store_planes(Params const& p, Maps const& maps, Result result,
                                             Block const& block, Slab const& slab, int portion,
                                             unsigned char const* staged) {
  constexpr int kChannels = Traits::kPortion / Traits::kSegments;
  int const channel = block.channel + portion * kChannels;
  if (channel >= p.output_channels) return;
  int const pieces = p.box[2] >> p.piece_shift;
  CUtensorMap const* const set =
      result == Result::kSaved ? &maps.saved[block.set] : &maps.parts[block.set];
  for (int piece = 0; piece < pieces; ++piece) {
    cute::SM90_TMA_STORE_5D::copy(set, staged + piece * (Memory::kPortionBytes / pieces),
                                  (slab.origin[2] + (piece << p.piece_shift)) * Traits::kSegments,
                                  slab.origin[1], slab.origin[0], channel, slab.sample);
  }
}

template <class Traits, bool kChannelsLast, int kPortionIndex = 0>
__device__ __forceinline__ void store_portions(Params const& p, Maps const& maps, Result result,
                                               Block const& block, Slab const& slab,
                                               Consumer const& self, Sums<Traits>& sums,
                                               unsigned char* staged) {
  if constexpr (kPortionIndex < Traits::kColumns / Traits::kPortion) {
    constexpr int kStaged = Traits::kShape.staged_portions();
    unsigned char* const own = staged + kPortionIndex % kStaged * Memory::kPortionBytes;
    // The copies of the portion that lay here have read it.
    if (self.thread == 0) device::wait_stores_read<kStaged - 1>();
    self.sync();
    if constexpr (kChannelsLast) {
      stage_pixels<Traits, kPortionIndex>(p, self, sums, own);
    } else {
      stage_planes<Traits, kPortionIndex>(p, self, sums, own);
    }
    device::fence_async_proxy();
    self.sync();
    if (self.thread == 0) {
      if constexpr (kChannelsLast) {
        store_pixels<Traits>(p, maps, result, block, slab, kPortionIndex, own);
      } else {
        store_planes<Traits>(p, maps, result, block, slab, kPortionIndex, own);
      }
      device::commit_stores();
    }
    store_portions<Traits, kChannelsLast, kPortionIndex + 1>(p, maps, result, block, slab, self,
                                                             sums, staged);
  }
}

template <class Traits>
__device__ __forceinline__ void store(Params const& p, Maps const& maps, Result result,
                                      Block const& block, Slab const& slab, Consumer const& self,
                                      Sums<Traits>& sums, unsigned char* staged) {
  if constexpr (Traits::kSegments > 1) {
    if (Traits::kPlanes || !p.channels_last) {
      return store_portions<Traits, false>(p, maps, result, block, slab, self, sums, staged);
    }
  }
  if constexpr (!Traits::kPlanes) {
    store_portions<Traits, true>(p, maps, result, block, slab, self, sums, staged);
  }
}

}  // namespace fusedconv::conv::sm90::boxes
