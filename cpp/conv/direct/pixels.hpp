// The convolution channels last.
#pragma once

#include <cstdint>

#include "conv/direct/channel_moments.hpp"
#include "conv/direct/epilogue.hpp"
#include "conv/direct/params.hpp"
#include "cuda/math.hpp"

namespace fusedconv::conv::direct {

// A line of outputs, or a phase along width: its taps along the axis.
struct alignas(kLineBytes) Line {
  int taps;       // kOutside: not an output
  int first_tap;  // then every tap_step
  int at;         // input position of the first, then every sub_dilation less
  int output;     // position in the output
};
inline constexpr int kOutside = -1;

// Writes a tile's table: lines along depth, then height, each phase by phase, so that neighbours
// have as many taps; then the first output of each phase along width.
__device__ __forceinline__ void write_lines(Params const& p, Place const& place, Line* table) {
  int const first_h = p.lines[0], first_w = first_h + p.lines[1], count = first_w + p.lines[2];
#pragma unroll 1
  for (int i = threadIdx.x; i < count; i += kThreads) {
    int axis, quotient, residue;
    if (i < first_h) {
      axis = 0;
      p.tile_d(residue, quotient, i);
      quotient += place.origin[0];
    } else if (i < first_w) {
      axis = 1;
      p.tile_h(residue, quotient, i - first_h);
      quotient += place.origin[1];
    } else {
      axis = 2;
      residue = i - first_w;
      quotient = place.origin[2];
    }
    int const output = quotient * p.axes[axis].problem.stride + residue;
    Phase const phase = phase_of(p, axis, residue);
    table[i] = {output < p.axes[axis].problem.output ? phase.taps : kOutside, phase.first_tap,
                quotient + phase.shift, output};
  }
}

// [channel, depth, height, width, output channel of the block].
template <class T>
__device__ __forceinline__ void stage_weights(Params const& p, int first_channel, float* weights) {
  T const* const weight = static_cast<T const*>(p.weight);
  for (int i = threadIdx.x; i < p.weight_floats; i += kThreads) {
    int rest, column, x, y, z, c, group, k;
    p.weight_columns(rest, column, i);
    p.kernel_w(rest, x, rest);
    p.kernel_h(rest, y, rest);
    p.kernel_d(c, z, rest);
    p.group_channels(group, k, first_channel + column);
    float value = 0.0f;
    if (group < p.groups) {
      int64_t const channel = int64_t(group) * p.channels + c;
      value = device::to_float(
          weight[channel * p.source.stride_c + k * p.source.stride_k + z * p.source.stride_t +
                 y * p.source.stride_r + x * p.source.stride_s]);
    }
    weights[i] = value;
  }
}

// Adds what the taps of kPixels outputs of a phase, neighbours along width, give of one input
// channel for each of a thread's output channels. input: of the tile's sample and the thread's
// first channel.
template <class T, int kVector>
__device__ __forceinline__ void add_pixels(Params const& p, float (&sums)[kPixels][kVector],
                                           T const* input, int64_t pitch, float const* weights,
                                           Line const& z, Line const& y, Line const& x) {
  int const h = p.axes[1].problem.input, w = p.axes[2].problem.input;
#pragma unroll 1
  for (int a = 0; a < z.taps; ++a) {
    int const at_z = z.at - a * p.axes[0].sub_dilation;
    if (unsigned(at_z) >= unsigned(p.axes[0].problem.input)) continue;
    int const kernel_z = (z.first_tap + a * p.axes[0].tap_step) * p.kernel_h.divisor;
#pragma unroll 1
    for (int b = 0; b < y.taps; ++b) {
      int const at_y = y.at - b * p.axes[1].sub_dilation;
      if (unsigned(at_y) >= unsigned(h)) continue;
      int const kernel =
          (kernel_z + y.first_tap + b * p.axes[1].tap_step) * p.kernel_w.divisor + x.first_tap;
      int at_x = x.at;
      T const* source = input + int64_t((at_z * h + at_y) * w + at_x) * pitch;
      float const* weight = weights + kernel * p.block_channels;
      float of_row[kPixels][kVector];
      if constexpr (kSumsRows<T>) clear(of_row);
      auto& into = [&]() -> auto& {
        if constexpr (kSumsRows<T>) {
          return of_row;
        } else {
          return sums;
        }
      }();
#pragma unroll 1
      for (int c = 0; c < x.taps; ++c) {
        device::Pack<T, kVector> loaded[kPixels];
#pragma unroll
        for (int i = 0; i < kPixels; ++i) {
          if (unsigned(at_x + i) < unsigned(w)) {
            loaded[i] = device::Pack<T, kVector>::load(source + i * pitch);
          }
        }
        auto const own = device::Pack<float, kVector>::load(weight);
#pragma unroll
        for (int i = 0; i < kPixels; ++i) {
#pragma unroll
          for (int v = 0; v < kVector; ++v) {
            into[i][v] = fmaf(device::to_float(loaded[i].values[v]), own.values[v], into[i][v]);
          }
        }
        at_x -= p.axes[2].sub_dilation;
        source -= p.axes[2].sub_dilation * pitch;
        weight += p.axes[2].tap_step * p.block_channels;
      }
      if constexpr (kSumsRows<T>) add(sums, of_row);
    }
  }
}

// Merges each channel's moments over a block's lanes in a fixed tree, and leaves them.
template <int kVector>
__device__ __forceinline__ void leave_moments(Params const& p, Place const& place, int channel,
                                              int lane, int lanes, int all,
                                              device::Moments (&moments)[kVector],
                                              device::Moments* shared) {
  int half = 1;
  while (2 * half < lanes) half *= 2;
  for (; half > 0; half /= 2) {
    if (lane >= half && lane < 2 * half && lane < lanes) {
#pragma unroll
      for (int v = 0; v < kVector; ++v) shared[v * kThreads + threadIdx.x] = moments[v];
    }
    __syncthreads();
    if (lane < half && lane + half < lanes) {
      int const other = threadIdx.x + half * p.columns.divisor;
#pragma unroll
      for (int v = 0; v < kVector; ++v) moments[v].merge(shared[v * kThreads + other]);
    }
  }
  if (lane != 0 || channel >= all) return;
#pragma unroll
  for (int v = 0; v < kVector; ++v) {
    p.partials[(place.sample * p.slots + place.tile) * all + channel + v] = moments[v].partial();
  }
}

// kVector: channels of a thread, more than one where each group has one input and output channel.
template <class T, int kVector>
__global__ void __launch_bounds__(kThreads, 2) convolve_pixels(__grid_constant__ Params const p) {
  extern __shared__ __align__(16) unsigned char shared[];
  int rest, block, lane, column;
  p.channel_blocks(rest, block, int(blockIdx.x));
  Place place(p, rest);
  place.sample = rest;
  p.columns(lane, column, int(threadIdx.x));
  int const lanes = kThreads / p.columns.divisor, all = p.output_channels * p.groups;
  int const first_channel = block * p.block_channels;
  int const channel = first_channel + column * kVector;
  auto* const table = reinterpret_cast<Line*>(shared);
  auto* const weights = reinterpret_cast<float*>(table + p.lines[0] + p.lines[1] + p.lines[2]);
  write_lines(p, place, table);
  stage_weights<T>(p, first_channel, weights);
  __syncthreads();

  bool const active = lane < lanes && channel < all;
  int const depth = p.axes[0].problem.output, height = p.axes[1].problem.output;
  int const width = p.axes[2].problem.output;
  int64_t const input_pitch = int64_t(p.groups) * p.channels;
  int64_t const inputs =
      int64_t(p.axes[0].problem.input) * p.axes[1].problem.input * p.axes[2].problem.input;
  int const group = channel / p.output_channels;
  T const* const input =
      static_cast<T const*>(p.input) + place.sample * inputs * input_pitch + group * p.channels;
  T* const output =
      static_cast<T*>(p.output) + place.sample * (int64_t(depth) * height * width) * all + channel;
  float bias[kVector];
#pragma unroll
  for (int v = 0; v < kVector; ++v) {
    bias[v] = active && p.bias != nullptr
                  ? device::to_float(static_cast<T const*>(p.bias)[channel + v])
                  : 0.0f;
  }
  ChannelMoments<kVector> moments;
  int const weight_channel =
      p.kernel_d.divisor * p.kernel_h.divisor * p.kernel_w.divisor * p.block_channels;
  int const units = active ? p.lines[0] * p.lines[1] * p.lines[2] * p.run_count : 0;
  int const end = min(place.origin[2] + p.tile[2], p.axes[2].positions);
  for (int unit = lane; unit < units; unit += lanes) {
    int at, first, residue, h;
    p.runs(at, first, unit);
    p.phases_w(at, residue, at);
    p.lines_h(at, h, at);
    Line const z = table[at], y = table[p.lines[0] + h];
    Line x = table[p.lines[0] + p.lines[1] + residue];
    first *= kPixels;
    x.at += first;
    x.output += first * p.axes[2].problem.stride;
    if (z.taps < 0 || y.taps < 0 || x.output >= width) continue;
    float values[kPixels][kVector];
    clear(values);
    for (int c = 0; c < p.channels; ++c) {
      add_pixels<T, kVector>(p, values, input + c, input_pitch,
                             weights + c * weight_channel + column * kVector, z, y, x);
    }
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
#pragma unroll
      for (int v = 0; v < kVector; ++v) values[i][v] += bias[v];
    }
    int const count = min(min(kPixels, end - place.origin[2] - first),
                          (width - x.output - 1) / p.stride_w.divisor + 1);
    T* const target = output + int64_t((z.output * height + y.output) * width + x.output) * all;
    auto const store = [&] {
#pragma unroll
      for (int i = 0; i < kPixels; ++i) {
        if (i >= count) break;
        device::Pack<T, kVector> pack;
#pragma unroll
        for (int v = 0; v < kVector; ++v) pack.values[v] = device::from_float<T>(values[i][v]);
        pack.store(target + int64_t(i) * p.stride_w.divisor * all);
      }
    };
    if (!p.activates_output) {
      if (p.partials != nullptr) round_as_stored<T>(values);
      store();
    }
    if (p.activates_output || p.partials != nullptr) activate<T>(p.activation, values);
    if (p.activates_output && p.partials != nullptr) round_as_stored<T>(values);
    if (p.partials != nullptr) {
      float rows[kVector][kPixels];
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
#pragma unroll
        for (int i = 0; i < kPixels; ++i) rows[v][i] = values[i][v];
      }
      moments.template add<kPixels>(count, [&](int v) -> auto const& { return rows[v]; });
    }
    if (p.activates_output) store();
  }
  if (p.partials != nullptr) {
    __syncthreads();
    device::Moments merged[kVector];
#pragma unroll
    for (int v = 0; v < kVector; ++v) merged[v] = moments.moments[v].moments(moments.count);
    leave_moments<kVector>(p, place, channel, lane, lanes, all, merged,
                           reinterpret_cast<device::Moments*>(weights));
  }
}

}  // namespace fusedconv::conv::direct
