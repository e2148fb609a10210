// From products to outputs.
#pragma once

#include <cstdint>
#include <type_traits>

#include "conv/activate.hpp"
#include "conv/sm90/lines/params.hpp"
#include "cuda/early.hpp"
#include "cuda/math.hpp"

namespace fusedconv::conv::sm90::lines {

inline constexpr int kSums = kColumns / 2;  // of a thread and an instruction
inline constexpr int kEights = kColumns / 8;

// What a lane has of a tile: two neighbouring phases of a channel, rows l and l + 8 of its warp's,
// at two positions of each eight, 2 q and 2 q + 1.
struct Lane {
  int quarter;  // q
  int channel;  // of the output
  int pair;     // m: the phases are 2 m and 2 m + 1

  __device__ __forceinline__ Lane(Params const& p, int row_block) {
    int const lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32 % 4;
    RowPlace const at(lane / 4, p.stride);
    quarter = lane % 4;
    channel = (row_block * (kRows / 16) + warp) * (16 / p.stride) + at.channel;
    pair = at.phase / 2;
  }
};

// What a quad's neighbouring lane has of the position before or ahead, which the quad's last or
// first lane has in the eight beside.
__device__ __forceinline__ float from_before(Lane const& own, float here, float eight_before) {
  int const lane = int(threadIdx.x) % 32;
  return __shfl_sync(~0u, own.quarter == 3 ? eight_before : here, (lane & ~3) | ((lane + 3) & 3));
}
template <class V>
__device__ __forceinline__ V from_next(Lane const& own, V here, V eight_ahead) {
  int const lane = int(threadIdx.x) % 32;
  return __shfl_sync(~0u, own.quarter == 0 ? eight_ahead : here, (lane & ~3) | ((lane + 1) & 3));
}

// Adds to the centers of an eight the sides of the positions before.
__device__ __forceinline__ void add_sides(Lane const& own, int eight, float (&center)[kSums],
                                          float const (&side)[kSums]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int const even = eight * 4 + 2 * h, odd = even + 1;
    center[even] += from_before(own, side[odd], eight > 0 ? side[odd - 4] : 0.0f);
    center[odd] += side[even];
  }
}

// Of a lane's channel: what its sums begin with, and what is done to them.
struct ChannelValues {
  float start, scale, shift;
};

template <class T>
__device__ __forceinline__ ChannelValues channel_values(Params const& p, Lane const& own) {
  int const channel = min(own.channel, p.output_channels - 1);
  float const bias =
      p.bias != nullptr ? device::to_float(static_cast<T const*>(p.bias)[channel]) : 0.0f;
  if (p.scale != nullptr || p.shift != nullptr) device::wait_for_launch_in_front();
  float const shift = p.shift != nullptr ? p.shift[channel] : 0.0f;
  if (p.scale == nullptr) return {bias + shift, 1.0f, 0.0f};
  return {bias, p.scale[channel], shift};
}

template <class T>
__device__ __forceinline__ void finish(Params const& p, ChannelValues const& own,
                                       float (&values)[kSums]) {
  if (p.scale != nullptr) {
#pragma unroll
    for (float& value : values) value = fmaf(value, own.scale, own.shift);
  }
  activate<T>(p.activation, values);
}

// A tile's outputs four at a time. line: the channel's. prepare(eight): adds up what is not yet.
// kLate: some phases of a stride are a position late, of a stride of two the second, of others
// those from the rotation's complement on.
template <int kStride, bool kLate, class T, class Prepare>
__device__ __forceinline__ void store_fours(Params const& p, Lane const& own, T* line, int position,
                                            float (&values)[kSums], Prepare const& prepare) {
  constexpr bool kExchanges = kStride > 2;
  bool const odd = own.pair % 2 != 0;
  bool const late = kExchanges && 2 * own.pair + p.rotation >= kStride;
  auto const word = [&](int i, int e) {
    return device::Pack<T, 2>::of({values[i * 4 + e], values[i * 4 + 2 + e]}).bits[0];
  };
  int const first = (position + 2 * own.quarter + (kExchanges && odd ? 1 : 0)) * kStride +
                    (kExchanges ? own.pair / 2 * 4 : 0);
  // Of a channel's lines those outputs that are in them, of a tile those whose neighbours were
  // there: all of four are or none.
  int const begin = max(0, (position + kFirstOutput) * kStride + p.base);
  int const end = min(p.output_length, (position + kFirstOutput + kOutputs) * kStride + p.base);
  uint32_t const room = own.channel < p.output_channels ? uint32_t(end - begin) : 0;
  uint32_t const behind = uint32_t(first + p.base - begin);
  T* const target = line + first;
  prepare(0);
#pragma unroll
  for (int i = 0; i < kEights; ++i) {
    bool const last = i + 1 == kEights;
    if (!last) prepare(i + 1);
    uint32_t here, next;
    if constexpr (kLate && !kExchanges) {
      float const taken =
          from_next(own, values[i * 4 + 2], last ? 0.0f : values[(last ? i : i + 1) * 4 + 2]);
      here = device::Pack<T, 2>::of({values[i * 4], values[i * 4 + 3]}).bits[0];
      next = device::Pack<T, 2>::of({values[i * 4 + 1], taken}).bits[0];
    } else {
      // Both phases at one position, then at the next.
      here = word(i, 0);
      next = word(i, 1);
    }
    if constexpr (kExchanges) {
      if constexpr (kLate) {
        uint32_t const taken = from_next(own, here, word(last ? i : i + 1, 0));
        if (late) {
          here = next;
          next = taken;
        }
      }
      // Lanes of neighbouring pairs of phases take a position each, with both pairs.
      uint32_t const taken = __shfl_xor_sync(~0u, odd ? here : next, 4);
      if (odd) {
        here = taken;
      } else {
        next = taken;
      }
    }
    if (behind + uint32_t(i * 8 * kStride) < room) {
      *reinterpret_cast<uint2*>(target + i * 8 * kStride) = {here, next};
    }
  }
}

// A tile's outputs one by one.
template <class T>
__device__ __forceinline__ void store_each(Params const& p, Lane const& own, T* line, int position,
                                           float const (&values)[kSums]) {
  if (own.channel >= p.output_channels) return;
#pragma unroll
  for (int j = 0; j < kSums; ++j) {
    int const phase = 2 * own.pair + j / 2 % 2;
    bool const late = phase + p.rotation >= p.stride;
    int const column = j / 4 * 8 + 2 * own.quarter + j % 2 - (late ? 1 : 0);
    int const output = (position + column) * p.stride + phase;
    if (column < kFirstOutput || column >= kFirstOutput + kOutputs) continue;
    if (output + p.base < 0 || output + p.base >= p.output_length) continue;
    line[output] = device::from_float<T>(values[j]);
  }
}

// sample: where its output begins. position: of column 0. center is the output's then.
template <class T>
__device__ __forceinline__ void store_outputs(Params const& p, Lane const& own,
                                              ChannelValues const& values, T* sample, int position,
                                              float (&center)[kSums], float const (&side)[kSums]) {
  T* const line = sample + int64_t(own.channel) * p.output_length + p.base;
  auto const add = [&](int eight) { add_sides(own, eight, center, side); };
  auto const fours = [&](auto const& prepare) {
    auto const of = [&](auto stride) {
      if (p.rotation != 0) {
        store_fours<stride.value, true>(p, own, line, position, center, prepare);
      } else {
        store_fours<stride.value, false>(p, own, line, position, center, prepare);
      }
    };
    switch (p.stride) {
      case 2: return of(std::integral_constant<int, 2>{});
      case 4: return of(std::integral_constant<int, 4>{});
      case 8: return of(std::integral_constant<int, 8>{});
      default: return of(std::integral_constant<int, kMostStride>{});
    }
  };
  // What asks for no more is stored eight by eight as it is added up: stores all at once are waited
  // for.
  if (p.whole && p.scale == nullptr && p.activation == Activation::kIdentity) return fours(add);
#pragma unroll
  for (int i = 0; i < kEights; ++i) add(i);
  finish<T>(p, values, center);
  if (p.whole) return fours([](int) {});
  store_each(p, own, line, position, center);
}

}  // namespace fusedconv::conv::sm90::lines
