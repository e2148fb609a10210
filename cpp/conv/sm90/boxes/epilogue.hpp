// What becomes of a consumer's accumulators: bias, scale and shift, GroupNorm by statistics,
// normalisation of pixels, activation, and by shared memory and tensor copies to the output.
//
// Of a warp's rows a lane has lane / 4 and that plus 8, and of every 8 columns two from lane % 4 *
// 2: sum 4 j + 2 (row / 8) + column % 2 of a segment is of its columns 8 j and on.
#pragma once

#include <cstdint>
#include <type_traits>

#include "conv/sm90/boxes/copies.hpp"
#include "conv/sm90/boxes/params.hpp"
#include "conv/sm90/boxes/traits.hpp"
#include "cuda/async.hpp"
#include "cuda/math.hpp"
#include "fusedconv/activation.hpp"
#include "layernorm/pixel.hpp"

namespace fusedconv::conv::sm90::boxes {

template <class Traits>
using Sums = float[Traits::kSegments][Traits::kSums];

// By the numbers that they would have in one segment.
template <class Traits>
__device__ __forceinline__ constexpr float& sum_at(Sums<Traits>& sums, int index) {
  return sums[index / Traits::kSums][index % Traits::kSums];
}

template <class Traits, class Body>
__device__ __forceinline__ void for_each_sum(Sums<Traits>& sums, Body const& body) {
#pragma unroll
  for (auto& segment : sums) {
#pragma unroll
    for (float& sum : segment) body(sum);
  }
}

// A consumer among the block's threads.
struct Consumer {
  int index, thread, warp, lane;

  __device__ __forceinline__ void sync() const {
    device::sync_threads(1 + index, kWarpgroupThreads);
  }
};

// Which channel and phase a column of a block is; none where `phase` is that of no set.
struct ColumnPlace {
  bool present;
  int phase, channel;

  __device__ __forceinline__ ColumnPlace(Params const& p, Block const& block, int column) {
    int segment, within;
    p.segments(segment, within, column);
    channel = block.channel + within;
    phase = p.first_phase[block.set] + segment;
    present = segment < p.set_phases[block.set] && channel < p.output_channels;
  }
};

// Until what the consumer has staged may be overwritten, by all its threads.
__device__ __forceinline__ void finish_copies(Consumer const& self) {
  if (self.thread == 0) device::wait_stores_read();
  self.sync();
}

// Which of a convolution's results an epilogue computes: what is saved for the backward pass, the
// biased sum; the output, from sums or from what is saved of them.
enum class Result { kSaved, kOutput };

// Scales and shifts the columns of channels that exist by what map(channel) says.
template <class Traits, class Map>
__device__ __forceinline__ void apply(Params const& p, Block const& block, Consumer const& self,
                                      float2* linear, Sums<Traits>& sums, Map const& map) {
  for (int i = self.thread; i < Traits::kColumns; i += kWarpgroupThreads) {
    ColumnPlace const at(p, block, i);
    bool const own = at.present && at.channel < p.own_channels;
    linear[i] = own ? map(at.channel) : make_float2(1.0f, 0.0f);
  }
  self.sync();
#pragma unroll
  for (int j = 0; j < Traits::kColumns / 8; ++j) {
    // Of two columns.
    float4 const own = reinterpret_cast<float4 const*>(linear)[j * 4 + self.lane % 4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float& first = sum_at<Traits>(sums, 4 * j + 2 * half);
      float& second = sum_at<Traits>(sums, 4 * j + 2 * half + 1);
      first = fmaf(first, own.x, own.y);
      second = fmaf(second, own.z, own.w);
    }
  }
  self.sync();
}

// What GroupNorm does to a channel of a sample once the bias is added: first to take the mean from
// it, so that of a group of equal values nothing is left, then to scale what is left.
__device__ __forceinline__ float2 normalizing_map(Params const& p, int sample, int channel,
                                                  bool centres) {
  GroupStatistics const& g = p.group;
  int group, within;
  p.group_channels(group, within, channel);
  groupnorm::Statistics const own = g.statistics[sample * g.groups + group];
  if (centres) return {1.0f, -own.mean};
  float const weight = g.weight ? device::load_as_float(g.weight, channel, g.dtype) : 1.0f;
  float const bias = g.bias ? device::load_as_float(g.bias, channel, g.dtype) : 0.0f;
  float const scale = own.rstd * weight;
  return {scale, fmaf(-own.low, scale, bias)};
}

// Adds the bias unless it has been added, and scales and shifts the output, by statistics of its
// group where there are.
template <class Traits>
__device__ __forceinline__ void scale_and_shift(Params const& p, Block const& block,
                                                Slab const& slab, Consumer const& self,
                                                Result result, float2* linear, Sums<Traits>& sums) {
  using T = typename Traits::Element;
  bool const biases = p.bias != nullptr && (result == Result::kSaved || !p.saves);
  bool const scales = p.scale != nullptr && result == Result::kOutput;
  bool const shifts = p.shift != nullptr && result == Result::kOutput;
  finish_copies(self);
  int const maps = p.group.statistics == nullptr ? 1 : 3;
#pragma unroll 1
  for (int number = 0; number < maps; ++number) {
    apply<Traits>(p, block, self, linear, sums, [&](int channel) {
      if (number > 0) return normalizing_map(p, slab.sample, channel, number == 1);
      float const bias = biases ? device::to_float(static_cast<T const*>(p.bias)[channel]) : 0.0f;
      float const scale = scales ? p.scale[channel] : 1.0f;
      return make_float2(scale, fmaf(bias, scale, shifts ? p.shift[channel] : 0.0f));
    });
  }
}

// Of the four lanes that share a row.
__device__ __forceinline__ float total_of_row(float value) {
  value += __shfl_xor_sync(~0u, value, 1);
  return value + __shfl_xor_sync(~0u, value, 2);
}

// Normalises each pixel's channels, of which a block has kPixels times all by position. affine:
// weight and bias by column.
template <class Traits, int kPixels>
__device__ __forceinline__ void normalize_pixels(Params const& p, Consumer const& self,
                                                 float2 const* affine, Sums<Traits>& sums) {
  constexpr int kChannels = Traits::kColumns / kPixels;
  constexpr int kPairs = kChannels / 8;  // of a lane, row and pixel
#pragma unroll
  for (int pixel = 0; pixel < kPixels; ++pixel) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      auto const at = [&](int index) -> float& {
        return sum_at<Traits>(sums, 4 * (pixel * kPairs + index / 2) + 2 * half + index % 2);
      };
      float total = 0.0f;
#pragma unroll
      for (int i = 0; i < 2 * kPairs; ++i) total += at(i);
      float const mean = total_of_row(total) * (1.0f / kChannels);
      float deviations = 0.0f, squares = 0.0f;
#pragma unroll
      for (int i = 0; i < 2 * kPairs; ++i) {
        float const deviation = at(i) - mean;
        deviations += deviation;
        squares = fmaf(deviation, deviation, squares);
      }
      auto const statistics = layernorm::PixelStatistics::of(
          float(kChannels), mean, total_of_row(deviations), total_of_row(squares), p.norm.eps);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        // Of two columns.
        float4 const own =
            reinterpret_cast<float4 const*>(affine)[(pixel * kPairs + i) * 4 + self.lane % 4];
        float &first = at(2 * i), &second = at(2 * i + 1);
        first = statistics.template normalized<true>(first, {own.x, own.y});
        second = statistics.template normalized<true>(second, {own.z, own.w});
      }
    }
  }
}

template <class Traits>
__device__ __forceinline__ void normalize_pixels(Params const& p, Block const& block,
                                                 Consumer const& self, float2* affine,
                                                 Sums<Traits>& sums) {
  for (int i = self.thread; i < Traits::kColumns; i += kWarpgroupThreads) {
    int const channel = ColumnPlace(p, block, i).channel;
    affine[i] = {p.norm.weight ? device::load_as_float(p.norm.weight, channel, p.norm.dtype) : 1.0f,
                 p.norm.bias ? device::load_as_float(p.norm.bias, channel, p.norm.dtype) : 0.0f};
  }
  self.sync();
  switch (Traits::kColumns / p.segment) {
    case 1: normalize_pixels<Traits, 1>(p, self, affine, sums); break;
    case 2: normalize_pixels<Traits, 2>(p, self, affine, sums); break;
    case 4: normalize_pixels<Traits, 4>(p, self, affine, sums); break;
    default:
      if constexpr (Traits::kColumns >= 8 * kMostPixels) {
        normalize_pixels<Traits, kMostPixels>(p, self, affine, sums);
      }
  }
  self.sync();
}

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
