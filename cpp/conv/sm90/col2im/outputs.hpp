// From rows of products to outputs.
#pragma once

#include <cstdint>

#include "conv/activate.hpp"
#include "conv/sm90/col2im/params.hpp"
#include "cuda/math.hpp"

namespace fusedconv::conv::sm90::col2im {

// A block's part of the problem.
struct Tile {
  int sample;
  int first[kMaxAxes];   // output
  int origin[kMaxAxes];  // of the box

  __device__ __forceinline__ explicit Tile(Params const& p) {
    int rest, tile[kMaxAxes];
    p.tiles_w(rest, tile[2], int(blockIdx.x));
    p.tiles_h(rest, tile[1], rest);
    p.tiles_d(sample, tile[0], rest);
#pragma unroll
    for (int i = 0; i < kMaxAxes; ++i) {
      Axis const& axis = p.axes[i];
      first[i] = tile[i] * p.tile[i];
      int const reached = tile[i] * (p.tile[i] / axis.problem.stride) + axis.lowest;
      origin[i] = max(0, min(reached, axis.problem.input - p.box[i]));
    }
  }
};

// Which products along an axis an output adds up, if it is one: of taps of its phase from `begin`
// to `end`, tap 0's so many floats behind the first product, those of others by steps.
struct Reach {
  int first, begin, end;
  bool inside;
};
static_assert(sizeof(Reach) == kReachBytes);

// From a tap to the next one of a phase, in floats: a tap_step of taps on, sub_dilation positions
// back.
template <int kPitch>
__device__ __forceinline__ int step_of(Params const& p, int i) {
  Axis const& axis = p.axes[i];
  return axis.tap_step * p.columns[i] - axis.sub_dilation * p.rows[i] * kPitch;
}

// Those of a tile's outputs along all axes in turn.
template <int kThreads, int kPitch>
__device__ __forceinline__ void list_reaches(Params const& p, Tile const& tile, Reach* reaches) {
#pragma unroll
  for (int i = 0; i < kMaxAxes; ++i) {
#pragma unroll 1
    for (int own = int(threadIdx.x); own < p.tile[i]; own += kThreads) {
      int quotient, residue;
      p.strides[i](quotient, residue, tile.first[i] + own);
      Phase const phase = p.axes[i].phase(residue);
      int const position = quotient + phase.shift - tile.origin[i];
      int const back = p.axes[i].sub_dilation;
      // Taps whose positions, position - tap * back, are in the box.
      int const beyond = position - (p.box[i] - 1);
      int const begin = beyond > 0 ? (beyond + back - 1) / back : 0;
      int const end = position < 0 ? 0 : min(phase.taps, position / back + 1);
      reaches[p.first_reach[i] + own] = {
          position * p.rows[i] * kPitch + phase.first_tap * p.columns[i], begin, end,
          tile.first[i] + own < p.output_extent[i]};
    }
  }
}

// kShort: at most two taps along height and width, and one along depth.
template <bool kShort>
__device__ __forceinline__ float add_products(Reach const (&reach)[kMaxAxes],
                                              int const (&step)[kMaxAxes], float const* first) {
  float sum = 0.0f;
  if constexpr (kShort) {
    auto const meets = [&](int axis, int tap) {
      return reach[axis].begin <= tap && tap < reach[axis].end;
    };
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        bool const met = meets(0, 0) && meets(1, h) && meets(2, w);
        sum += met ? first[h * step[1] + w * step[2]] : 0.0f;
      }
    }
  } else {
#pragma unroll 1
    for (int d = reach[0].begin; d < reach[0].end; ++d) {
#pragma unroll 1
      for (int h = reach[1].begin; h < reach[1].end; ++h) {
        float const* const line = first + d * step[0] + h * step[1];
#pragma unroll 2
        for (int w = reach[2].begin; w < reach[2].end; ++w) sum += line[w * step[2]];
      }
    }
  }
  return sum;
}

// The tile's outputs, in the order in which they lie in memory, several at a time, or the latency
// of each would be waited for.
template <class T, int kThreads, int kPitch, bool kShort>
__device__ __forceinline__ void store_all(Params const& p, Tile const& tile, Reach const* reaches,
                                          float const* rows) {
  constexpr int kTogether = 4;
  int const step[kMaxAxes] = {step_of<kPitch>(p, 0), step_of<kPitch>(p, 1), step_of<kPitch>(p, 2)};
  int64_t const image = int64_t(tile.sample) * p.output_extent[0];
#pragma unroll 1
  for (int i = int(threadIdx.x); i < p.items; i += kTogether * kThreads) {
    float values[kTogether];
    int64_t index[kTogether];
    bool inside[kTogether];
    int channel[kTogether];
#pragma unroll
    for (int v = 0; v < kTogether; ++v) {
      int rest, own[kMaxAxes];
      // What is beyond the tile is computed as its last output, which is there.
      p.channels(rest, channel[v], min(i + v * kThreads, p.items - 1));
      p.width(rest, own[2], rest);
      p.height(own[0], own[1], rest);
      Reach const reach[kMaxAxes] = {reaches[p.first_reach[0] + own[0]],
                                     reaches[p.first_reach[1] + own[1]],
                                     reaches[p.first_reach[2] + own[2]]};
      inside[v] =
          i + v * kThreads < p.items && reach[0].inside && reach[1].inside && reach[2].inside;
      int const first =
          reach[0].first + reach[1].first + reach[2].first + channel[v] * p.channel_columns;
      values[v] = add_products<kShort>(reach, step, rows + first);
      int64_t const line =
          (image + tile.first[0] + own[0]) * p.output_extent[1] + tile.first[1] + own[1];
      index[v] =
          (line * p.output_extent[2] + tile.first[2] + own[2]) * p.output_channels + channel[v];
    }
#pragma unroll
    for (int v = 0; v < kTogether; ++v) {
      float& value = values[v];
      if (p.bias != nullptr) value += device::to_float(static_cast<T const*>(p.bias)[channel[v]]);
      if (p.scale != nullptr) value *= p.scale[channel[v]];
      if (p.shift != nullptr) value += p.shift[channel[v]];
    }
    activate<T>(p.activation, values);
#pragma unroll
    for (int v = 0; v < kTogether; ++v) {
      if (inside[v]) static_cast<T*>(p.output)[index[v]] = device::from_float<T>(values[v]);
    }
  }
}

template <class T, int kThreads, int kPitch>
__device__ __forceinline__ void store_outputs(Params const& p, Tile const& tile,
                                              Reach const* reaches, float const* rows) {
  if (p.short_taps) {
    store_all<T, kThreads, kPitch, true>(p, tile, reaches, rows);
  } else {
    store_all<T, kThreads, kPitch, false>(p, tile, reaches, rows);
  }
}

}  // namespace fusedconv::conv::sm90::col2im
