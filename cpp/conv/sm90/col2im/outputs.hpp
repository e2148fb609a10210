// From rows of products to outputs.
#pragma once

#include <cstdint>

#include "conv/activate.hpp"
#include "conv/sm90/col2im/params.hpp"
#include "cuda/math.hpp"

namespace fusedconv::conv::sm90::col2im {

inline constexpr int kFilterRows = 136;  // of a copy of a packed filter in float32, at most

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

// Of all axes in turn.
__device__ __forceinline__ void list_phases(Params const& p, Phase* phases) {
#pragma unroll
  for (int i = 0; i < kMaxAxes; ++i) {
    for (int residue = int(threadIdx.x); residue < p.axes[i].phases; residue += int(blockDim.x)) {
      phases[p.first_phase[i] + residue] = p.axes[i].phase(residue);
    }
  }
}

// Which products along an axis an output adds up: of tap 0 of its phase in row `row` of the box,
// each tap by so much further.
struct Reach {
  int taps, position, row, column;

  __device__ __forceinline__ Reach(Params const& p, Tile const& tile, Phase const* phases, int i,
                                   int output) {
    int quotient, residue;
    p.strides[i](quotient, residue, output);
    Phase const phase = phases[p.first_phase[i] + residue];
    taps = phase.taps;
    position = quotient + phase.shift - tile.origin[i];
    row = position * p.rows[i];
    column = phase.first_tap * p.columns[i];
  }
};

template <int kPitch>
__device__ __forceinline__ float add_products(Params const& p, Reach const (&reach)[kMaxAxes],
                                              int channel, float const* rows) {
  // From a tap to the next along an axis: a tap_step of taps on, sub_dilation positions back.
  int step[kMaxAxes];
#pragma unroll
  for (int i = 0; i < kMaxAxes; ++i) {
    Axis const& axis = p.axes[i];
    step[i] = axis.tap_step * p.columns[i] - axis.sub_dilation * p.rows[i] * kPitch;
  }
  auto const meets = [&](int i, int tap) {
    int const position = reach[i].position - tap * p.axes[i].sub_dilation;
    return tap < reach[i].taps && unsigned(position) < unsigned(p.box[i]);
  };
  float const* const first = rows + (reach[0].row + reach[1].row + reach[2].row) * kPitch +
                             reach[0].column + reach[1].column + reach[2].column +
                             channel * p.channel_columns;
  float sum = 0.0f;
#pragma unroll 1
  for (int d = 0; d < reach[0].taps; ++d) {
    if (!meets(0, d)) continue;
    float const* const plane = first + d * step[0];
    if (p.short_taps) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int w = 0; w < 2; ++w) {
          if (meets(1, h) && meets(2, w)) sum += plane[h * step[1] + w * step[2]];
        }
      }
    } else {
#pragma unroll 1
      for (int h = 0; h < reach[1].taps; ++h) {
        if (!meets(1, h)) continue;
#pragma unroll 2
        for (int w = 0; w < reach[2].taps; ++w) {
          if (meets(2, w)) sum += plane[h * step[1] + w * step[2]];
        }
      }
    }
  }
  return sum;
}

// The tile's outputs, in the order in which they lie in memory.
template <class T, int kThreads, int kPitch>
__device__ __forceinline__ void store_outputs(Params const& p, Tile const& tile,
                                              Phase const* phases, float const* rows) {
#pragma unroll 2
  for (int i = int(threadIdx.x); i < p.items; i += kThreads) {
    int rest, channel, own[kMaxAxes];
    p.channels(rest, channel, i);
    p.width(rest, own[2], rest);
    p.height(own[0], own[1], rest);
    int output[kMaxAxes];
    bool inside = true;
#pragma unroll
    for (int a = 0; a < kMaxAxes; ++a) {
      output[a] = tile.first[a] + own[a];
      inside = inside && output[a] < p.output_extent[a];
    }
    if (!inside) continue;
    Reach const reach[kMaxAxes] = {Reach(p, tile, phases, 0, output[0]),
                                   Reach(p, tile, phases, 1, output[1]),
                                   Reach(p, tile, phases, 2, output[2])};
    float values[1] = {add_products<kPitch>(p, reach, channel, rows)};
    if (p.bias != nullptr) values[0] += device::to_float(static_cast<T const*>(p.bias)[channel]);
    if (p.scale != nullptr) values[0] *= p.scale[channel];
    if (p.shift != nullptr) values[0] += p.shift[channel];
    activate<T>(p.activation, values);
    int64_t const pixel =
        ((int64_t(tile.sample) * p.output_extent[0] + output[0]) * p.output_extent[1] + output[1]) *
            p.output_extent[2] +
        output[2];
    static_cast<T*>(p.output)[pixel * p.output_channels + channel] =
        device::from_float<T>(values[0]);
  }
}

}  // namespace fusedconv::conv::sm90::col2im
