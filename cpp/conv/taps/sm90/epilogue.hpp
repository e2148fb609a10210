// What becomes of a consumer's accumulators: bias, scale and shift, activation, moments of each
// row, and by shared memory, warp by warp, to the output in the caller's layout.
#pragma once

#include <cstdint>

#include "conv/taps/sm90/params.hpp"
#include "conv/taps/sm90/producer.hpp"
#include "conv/taps/sm90/traits.hpp"
#include "cuda/async.hpp"
#include "cuda/math.hpp"
#include "fusedconv/activation.hpp"
#include "groupnorm/moments.hpp"

namespace fusedconv::conv::taps::sm90 {

// Of each instruction a lane has rows lane / 4 and 8 more of its warp's, and of every 8 columns two
// from lane % 4 * 2: element 4 j + 2 (row / 8) + column % 2.
template <class Traits>
using GroupSums = float[Traits::kMmas][Traits::kSums];
template <class Traits>
using Accumulators = GroupSums<Traits>[Traits::kRowGroups];

template <class Traits, class Body>
__device__ __forceinline__ void for_each_sum(Accumulators<Traits>& sums, Body const& body) {
#pragma unroll
  for (auto& group : sums) {
#pragma unroll
    for (auto& mma : group) {
#pragma unroll
      for (float& value : mma) body(value);
    }
  }
}

// The same by fours, with their number: body replaces them.
template <class Traits, class Body>
__device__ __forceinline__ void for_each_pack(Accumulators<Traits>& sums, Body const& body) {
  constexpr int kPacks = Traits::kSums / 4;
#pragma unroll
  for (int group = 0; group < Traits::kRowGroups; ++group) {
#pragma unroll
    for (int mma = 0; mma < Traits::kMmas; ++mma) {
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        float values[4];
#pragma unroll
        for (int v = 0; v < 4; ++v) values[v] = sums[group][mma][4 * i + v];
        body((group * Traits::kMmas + mma) * kPacks + i, values);
#pragma unroll
        for (int v = 0; v < 4; ++v) sums[group][mma][4 * i + v] = values[v];
      }
    }
  }
}

// Of 8 columns a lane's two, in a row of the first half or the second.
template <class Traits>
__device__ __forceinline__ constexpr float& sum_at(GroupSums<Traits>& sums, int tile, int half,
                                                   int column) {
  constexpr int kTiles = Traits::kMmaColumns / 8;
  return sums[tile / kTiles][tile % kTiles * 4 + half * 2 + column];
}

// Where a column's phases go: the first's place in the output, counted in elements from the first
// of the sample's and convolution group's; and by axis, how many phases from it lie within, up to
// kMaxPhaseStride: bytes of `within`. No phases: no column of the tile.
struct Column {
  int offset;
  uint32_t within;

  __device__ __forceinline__ bool holds(int const (&residue)[kMaxAxes]) const {
    return residue[0] < int(within & 0xff) && residue[1] < int(within >> 8 & 0xff) &&
           residue[2] < int(within >> 16);
  }
};

__device__ __forceinline__ Column column_of(Params const& p, Place const& place, int index,
                                            int mma_columns) {
  int position[kMaxAxes], sample = 0;
  if (p.order == Order::kLine) {
    int const at = place.first + index;
    if (at >= place.pixels) return {0, 0};
    int pixel;
    p.plane(sample, pixel, at);
    p.pixels_w(pixel, position[2], pixel);
    p.pixels_h(position[0], position[1], pixel);
  } else {
    int strip = 0, rest = index;
    if (p.order == Order::kStrips) {
      strip = index / mma_columns;
      rest = index % mma_columns;
    }
    p.box_w(rest, position[2], rest);
    position[2] += strip * 8;
    p.box_h(position[0], position[1], rest);
#pragma unroll
    for (int a = 0; a < kMaxAxes; ++a) {
      if (position[a] >= p.tile[a]) return {0, 0};
      position[a] += place.origin[a];
    }
  }
  uint32_t within = 0;
  int offset = 0, pixels = 1;
#pragma unroll
  for (int a = 0; a < kMaxAxes; ++a) {
    AxisProblem const& axis = p.axes[a].problem;
    int const first = position[a] * axis.stride;
    if (first >= axis.output) return {0, 0};
    within |= uint32_t(min(axis.output - first, kMaxPhaseStride)) << 8 * a;
    offset = offset * axis.output + first;
    pixels *= axis.output;
  }
  int const channels = p.output_channels * (p.blocks / p.blocks_m.divisor);
  return {
      p.channels_last ? (sample * pixels + offset) * channels : sample * pixels * channels + offset,
      within};
}

__device__ __forceinline__ float sum_over_quad(float value) {
  value += __shfl_xor_sync(~0u, value, 1);
  return value + __shfl_xor_sync(~0u, value, 2);
}

// Moments of a lane's row of a row group over the columns within, left by tile, consumer, phase and
// channel.
template <class Traits, int kHalf>
__device__ __forceinline__ void leave_moments(Params const& p, Place const& place,
                                              RowGroup const& group, Column const* columns,
                                              int consumer, int warp, GroupSums<Traits>& sums) {
  int const lane = threadIdx.x % 32;
  RowPlace const own(p, warp * kWarpRows + kHalf * 8 + lane / 4);
  // Of the row's columns among 32: bits 8 j + e for column e of its two in tile j. The rows of a
  // half have few phases, and the warp asks for each together.
  int const first_phase = __shfl_sync(~0u, own.phase, 0);
  int const last_phase = __shfl_sync(~0u, own.phase, 31);
  auto const within = [&](int word) {
    Column const column = columns[word * 32 + lane];
    uint32_t result = 0;
    for (int phase = first_phase; phase <= last_phase; ++phase) {
      int const held[kMaxAxes] = {group.residue[0], group.residue[1], group.residue[2] + phase};
      uint32_t const columns_held = __ballot_sync(~0u, column.holds(held));
      if (phase == own.phase) result = columns_held >> (lane % 4 * 2) & 0x03030303u;
    }
    return result;
  };
  auto const for_columns = [&](auto const& body) {
#pragma unroll
    for (int word = 0; word < Traits::kColumns / 32; ++word) {
      uint32_t const bits = within(word);
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        body((bits >> (c / 2 * 8 + c % 2) & 1) != 0,
             sum_at<Traits>(sums, word * 4 + c / 2, kHalf, c % 2));
      }
    }
  };
  // About the mean in one float; what it is off by follows from the deviations' sum.
  float count = 0.0f, sum = 0.0f;
  for_columns([&](bool is_within, float value) {
    count += is_within ? 1.0f : 0.0f;
    sum += is_within ? value : 0.0f;
  });
  count = sum_over_quad(count);
  float const mean = sum_over_quad(sum) / fmaxf(count, 1.0f);
  float deviations = 0.0f, squares = 0.0f;
  for_columns([&](bool is_within, float value) {
    float const d = is_within ? value - mean : 0.0f;
    deviations += d;
    squares = fmaf(d, d, squares);
  });
  deviations = sum_over_quad(deviations);
  squares = sum_over_quad(squares);
  device::Moments moments = device::shifted_moments(fmaxf(count, 1.0f), mean, deviations, squares);
  moments.count = count;
  int const channel = group.channel + own.channel;
  int const tile = p.shares_rows ? place.tile_index * kConsumers + consumer : place.tile_index;
  int64_t const slot = int64_t(place.sample) * p.partial_slots +
                       ((int64_t(tile) * p.axes[0].phases + group.residue[0]) * p.axes[1].phases +
                        group.residue[1]) *
                           p.axes[2].phases +
                       group.residue[2] + own.phase;
  int const groups = p.blocks / p.blocks_m.divisor;
  if (lane % 4 == 0 && group.present && channel < p.output_channels) {
    p.partials[(slot * groups + place.group) * p.output_channels + channel] = moments.partial();
  }
  __syncwarp();
}

// Puts kChunkColumns columns of a row group where the warp's stores find neighbours.
template <class Traits, int kChunk, bool kChannelsLast>
__device__ __forceinline__ void stage_values(GroupSums<Traits>& sums,
                                             typename Traits::Element* staged) {
  using T = typename Traits::Element;
  constexpr int kPitch = column_pitch(Traits::kElementBytes);
  int const lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < kChunkColumns / 8; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int const row = half * 8 + lane / 4, column = j * 8 + lane % 4 * 2;
      device::Pack<T, 2> pair;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        pair.values[e] =
            device::from_float<T>(sum_at<Traits>(sums, kChunk * (kChunkColumns / 8) + j, half, e));
      }
      if constexpr (kChannelsLast) {
        staged[column * kPitch + row] = pair.values[0];
        staged[(column + 1) * kPitch + row] = pair.values[1];
      } else {
        pair.store(staged + row * kRowPitch + column);
      }
    }
  }
}

// Channels first: a lane stores kPhases phases of kWide neighbouring columns of a channel; kJoined
// row groups share them. whole: by one vector.
template <class Traits, int kPhases, int kJoined, int kWide>
__device__ __forceinline__ void store_phases(typename Traits::Element const* staged,
                                             typename Traits::Element* target, int64_t plane,
                                             int channels, int left, bool whole) {
  using T = typename Traits::Element;
  constexpr int kGroupPhases = kPhases / kJoined;
  constexpr int kChannels = kWarpRows / kGroupPhases;
  constexpr int kLanes = kChunkColumns / kWide;  // of a channel
  constexpr int kAtOnce = 32 / kLanes;           // channels
  constexpr int kElements = kPhases * kWide;
  constexpr int kVector = kElements < Traits::kVector ? kElements : Traits::kVector;
  int const own = threadIdx.x % 32 / kLanes;
  T const* source = staged + own * kRowPitch + threadIdx.x % kLanes * kWide;
  target += own * plane;
#pragma unroll 2
  for (int channel = own; channel < channels; channel += kAtOnce) {
    device::Pack<T, kWide> columns[kPhases];
#pragma unroll
    for (int phase = 0; phase < kPhases; ++phase) {
      columns[phase] = device::Pack<T, kWide>::load(
          source +
          (phase / kGroupPhases * kWarpRows + phase % kGroupPhases * kChannels) * kRowPitch);
    }
#pragma unroll
    for (int first = 0; first < kElements; first += kVector) {
      device::Pack<T, kVector> pack;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        pack.values[i] = columns[(first + i) % kPhases].values[(first + i) / kPhases];
      }
      if (whole) {
        if (kWide > 1 || first < left) pack.store(target + first);
      } else {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          if (first + i < left) target[first + i] = pack.values[i];
        }
      }
    }
    source += kAtOnce * kRowPitch;
    target += kAtOnce * plane;
  }
}

template <class Traits, int kJoined>
__device__ __forceinline__ void store_planes(Params const& p, RowGroup const& group,
                                             Column const* columns, int warp,
                                             typename Traits::Element const* staged,
                                             typename Traits::Element* output, int64_t plane) {
  using T = typename Traits::Element;
  auto const by = [&](auto group_phases, auto wide) {
    constexpr int kWide = decltype(wide)::value;
    constexpr int kPhases = decltype(group_phases)::value * kJoined;
    Column const column = columns[threadIdx.x % (kChunkColumns / kWide) * kWide];
    int const each = kWarpRows / decltype(group_phases)::value;
    int const channel0 = group.channel + warp * each;
    // None where the column lies outside.
    int const channels = group.present && group.residue[0] < int(column.within & 0xff) &&
                                 group.residue[1] < int(column.within >> 8 & 0xff)
                             ? min(each, p.output_channels - channel0)
                             : 0;
    int const left = int(column.within >> 16) - group.residue[2];
    T* const target = output + channel0 * plane + column.offset +
                      (group.residue[0] * p.axes[1].problem.output + group.residue[1]) *
                          p.axes[2].problem.output +
                      group.residue[2];
    store_phases<Traits, kPhases, kJoined, kWide>(staged, target, plane, channels, left,
                                                  p.stores_whole);
  };
  auto const with = [&](auto group_phases) {
    constexpr int kPhases = decltype(group_phases)::value * kJoined;
    if constexpr (4 * kPhases <= Traits::kVector) {
      if (p.store_columns == 4) return by(group_phases, std::integral_constant<int, 4>{});
    }
    if constexpr (2 * kPhases <= Traits::kVector) {
      if (p.store_columns == 2) return by(group_phases, std::integral_constant<int, 2>{});
    }
    by(group_phases, std::integral_constant<int, 1>{});
  };
  switch (p.group_phases) {
    case 1: return with(std::integral_constant<int, 1>{});
    case 2: return with(std::integral_constant<int, 2>{});
    case 4: return with(std::integral_constant<int, 4>{});
    case 8: return with(std::integral_constant<int, 8>{});
  }
}

// Channels last: neighbouring lanes store neighbouring channels of a pixel.
template <class Traits, int kVector>
__device__ __forceinline__ void store_pixels(Params const& p, RowGroup const& group,
                                             Column const* columns, int warp,
                                             typename Traits::Element const* staged,
                                             typename Traits::Element* output) {
  using T = typename Traits::Element;
  constexpr int kPitch = column_pitch(Traits::kElementBytes);
  constexpr int kVectors = kWarpRows / kVector;  // of a pixel
  int const lane = threadIdx.x % 32;
  RowPlace const row(p, warp * kWarpRows + lane % kVectors * kVector);
  int const channel = group.channel + row.channel;
  if (!group.present || channel >= p.output_channels) return;
  int const residue[kMaxAxes] = {group.residue[0], group.residue[1], group.residue[2] + row.phase};
  int const channels = p.output_channels * (p.blocks / p.blocks_m.divisor);
  int64_t const shift =
      ((int64_t(residue[0]) * p.axes[1].problem.output + residue[1]) * p.axes[2].problem.output +
       residue[2]) *
          channels +
      channel;
#pragma unroll
  for (int i = 0; i < kChunkColumns / (32 / kVectors); ++i) {
    int const at = i * (32 / kVectors) + lane / kVectors;
    Column const column = columns[at];
    if (!column.holds(residue)) continue;
    device::Pack<T, kVector>::load(staged + at * kPitch + lane % kVectors * kVector)
        .store(output + column.offset + shift);
  }
}

// Stages one chunk of columns: which one is not known at compile time, but where its sums are is.
template <class Traits, bool kChannelsLast, int kChunk = 0>
__device__ __forceinline__ void stage_chunk(Accumulators<Traits>& sums, int chunk,
                                            typename Traits::Element* staged) {
  if constexpr (kChunk < Traits::kColumns / kChunkColumns) {
    if (chunk != kChunk) {
      return stage_chunk<Traits, kChannelsLast, kChunk + 1>(sums, chunk, staged);
    }
#pragma unroll
    for (int i = 0; i < Traits::kRowGroups; ++i) {
      stage_values<Traits, kChunk, kChannelsLast>(
          sums[i], staged + i * group_values(kChannelsLast, Traits::kElementBytes));
    }
  }
}

template <class Traits, bool kChannelsLast>
__device__ __forceinline__ void store(Params const& p, Place const& place,
                                      RowGroup const (&groups)[Traits::kRowGroups],
                                      Column const* columns, int warp, Accumulators<Traits>& sums,
                                      typename Traits::Element* staged) {
  using T = typename Traits::Element;
  constexpr int kGroupValues = group_values(kChannelsLast, Traits::kElementBytes);
  int64_t const plane =
      int64_t(p.axes[0].problem.output) * p.axes[1].problem.output * p.axes[2].problem.output;
  int const conv_groups = p.blocks / p.blocks_m.divisor;
  T* const output = static_cast<T*>(p.output) +
                    int64_t(place.sample) * conv_groups * p.output_channels * plane +
                    int64_t(place.group) * p.output_channels * (kChannelsLast ? 1 : plane);
#pragma unroll 1
  for (int chunk = 0; chunk < Traits::kColumns / kChunkColumns; ++chunk) {
    Column const* const own = columns + chunk * kChunkColumns;
    stage_chunk<Traits, kChannelsLast>(sums, chunk, staged);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < Traits::kRowGroups; ++i) {
      T const* const source = staged + i * kGroupValues;
      if constexpr (kChannelsLast) {
        if (p.stores_whole) {
          store_pixels<Traits, Traits::kVector>(p, groups[i], own, warp, source, output);
        } else {
          store_pixels<Traits, 1>(p, groups[i], own, warp, source, output);
        }
      } else if (Traits::kRowGroups > 1 && p.joins_groups) {
        if (i == 0) {
          store_planes<Traits, Traits::kRowGroups>(p, groups[0], own, warp, source, output, plane);
        }
      } else {
        store_planes<Traits, 1>(p, groups[i], own, warp, source, output, plane);
      }
    }
    __syncwarp();
  }
}

template <class Traits>
__device__ __forceinline__ void store(Params const& p, Place const& place,
                                      RowGroup const (&groups)[Traits::kRowGroups],
                                      Column const* columns, int warp, Accumulators<Traits>& sums,
                                      typename Traits::Element* staged) {
  if (p.channels_last) {
    store<Traits, true>(p, place, groups, columns, warp, sums, staged);
  } else {
    store<Traits, false>(p, place, groups, columns, warp, sums, staged);
  }
}

// What a lane's rows are scaled by and what is added then; loaded before the products, under which
// it arrives.
template <class Traits>
struct Linear {
  float scale[Traits::kRowGroups][2], shift[Traits::kRowGroups][2];

  __device__ __forceinline__ Linear(Params const& p, Place const& place,
                                    RowGroup const (&groups)[Traits::kRowGroups], int warp) {
    using T = typename Traits::Element;
#pragma unroll
    for (int i = 0; i < Traits::kRowGroups; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        RowPlace const own(p, warp * kWarpRows + half * 8 + threadIdx.x % 32 / 4);
        int const of_group = groups[i].channel + own.channel;
        int const channel = place.group * p.output_channels + of_group;
        bool const present = of_group < p.output_channels;
        float const bias = p.bias != nullptr && present
                               ? device::to_float(static_cast<T const*>(p.bias)[channel])
                               : 0.0f;
        scale[i][half] = p.scale != nullptr && present ? p.scale[channel] : 1.0f;
        shift[i][half] =
            fmaf(bias, scale[i][half], p.shift != nullptr && present ? p.shift[channel] : 0.0f);
      }
    }
  }
};

template <class Traits>
__device__ __forceinline__ void finish(Params const& p, Place const& place,
                                       RowGroup const (&groups)[Traits::kRowGroups], int consumer,
                                       int warp, Accumulators<Traits>& sums,
                                       Linear<Traits> const& linear, Column const* columns,
                                       typename Traits::Element* staged) {
#pragma unroll
  for (int i = 0; i < Traits::kRowGroups; ++i) {
#pragma unroll
    for (int e = 0; e < Traits::kColumns / 2; ++e) {
      float& sum = sum_at<Traits>(sums[i], e / 4, e / 2 % 2, e % 2);
      sum = fmaf(sum, linear.scale[i][e / 2 % 2], linear.shift[i][e / 2 % 2]);
    }
  }
  auto const round = [&] {
    if (p.partials == nullptr) return;
    for_each_sum<Traits>(
        sums, [](float& value) { value = device::as_stored<typename Traits::Element>(value); });
  };
  if (!p.activates_output) {
    round();
    store<Traits>(p, place, groups, columns, warp, sums, staged);
  }
  dispatch_activation(p.activation, [&](auto form) {
    using Form = decltype(form);
    for_each_sum<Traits>(sums, [](float& value) {
      value = Traits::kSplits ? Form::value(value) : device::quick_value<Form>(value);
    });
  });
  if (p.activates_output) round();
  if (p.partials != nullptr) {
#pragma unroll
    for (int i = 0; i < Traits::kRowGroups; ++i) {
      leave_moments<Traits, 0>(p, place, groups[i], columns, consumer, warp, sums[i]);
      leave_moments<Traits, 1>(p, place, groups[i], columns, consumer, warp, sums[i]);
    }
  }
  if (p.activates_output) store<Traits>(p, place, groups, columns, warp, sums, staged);
}

}  // namespace fusedconv::conv::taps::sm90
