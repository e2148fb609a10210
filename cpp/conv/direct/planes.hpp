// The convolution channels first.
#pragma once

#include <cstdint>

#include "conv/direct/epilogue.hpp"
#include "conv/direct/params.hpp"
#include "conv/direct/taps.hpp"
#include "cuda/math.hpp"

namespace fusedconv::conv::direct {

// A team's tile and its part of shared memory.
template <class T>
struct Team {
  Place place;
  int thread, group, first_channel;  // the latter of the group's output channels
  bool active;
  float* weights;
  float* box;
  T* staged;

  __device__ __forceinline__ Team(Params const& p, unsigned char* shared, int team, int team_bytes,
                                  int index)
      : Team(p, shared + team * team_bytes, index < p.tile_count,
             index < p.tile_count ? index : 0) {}

 private:
  __device__ __forceinline__ Team(Params const& p, unsigned char* shared, bool active, int rest)
      : place(p, rest), thread(threadIdx.x % p.team_threads), active(active) {
    int block;
    p.channel_blocks(rest, block, rest);
    p.conv_groups(place.sample, group, rest);
    first_channel = block * p.block_channels;
    weights = reinterpret_cast<float*>(shared);
    box = weights + p.weight_floats;
    staged = reinterpret_cast<T*>(box + p.channels * p.box[0] * p.box[1] * p.box[2]);
  }
};

// [output channel, channel, depth, height, width], rows of whole quads.
template <class T>
__device__ __forceinline__ void stage_weights(Params const& p, Team<T> const& team) {
  T const* const weight = static_cast<T const*>(p.weight);
  for (int i = team.thread; i < p.weight_floats; i += p.team_threads) {
    int rest, x, y, z, c;
    p.kernel_w(rest, x, i);
    p.kernel_h(rest, y, rest);
    p.kernel_d(rest, z, rest);
    p.taps_channels(rest, c, rest);
    int const k = team.first_channel + rest;
    float value = 0.0f;
    if (x < p.axes[2].problem.kernel && k < p.output_channels) {
      int64_t const channel = int64_t(team.group) * p.channels + c;
      value = device::to_float(
          weight[channel * p.source.stride_c + k * p.source.stride_k + z * p.source.stride_t +
                 y * p.source.stride_r + x * p.source.stride_s]);
    }
    team.weights[i] = value;
  }
}

// The input under the tile, with zeros outside: [channel, depth, height, width]. A thread has one
// quad of columns of every few lines (of a box wider than the team, several quads of every line),
// and loads some before it stores others.
template <class T>
class BoxLoader {
  static constexpr int kQuads = 6;
  using Quad = device::Pack<T, 4>;

 public:
  __device__ __forceinline__ BoxLoader(Params const& p, Team<T> const& team,
                                       int const (&origin)[kMaxAxes])
      : lead_(p.vector_loads ? origin[2] & 3 : 0), lines_(p.channels * p.box[0] * p.box[1]) {
    p.team_quads(first_line_, quad_, team.thread);
    int64_t const plane =
        int64_t(p.axes[0].problem.input) * p.axes[1].problem.input * p.axes[2].problem.input;
    input_ = static_cast<T const*>(p.input) +
             (int64_t(team.place.sample) * p.groups + team.group) * p.channels * plane;
    if (first_line_ < p.team_lines) load(p, origin);
  }

  __device__ __forceinline__ void finish(Params const& p, Team<T> const& team,
                                         int const (&origin)[kMaxAxes]) {
    if (first_line_ >= p.team_lines) return;
    while (store(p, team)) load(p, origin);
  }

 private:
  // A thread's item: its line and its quad, false behind the last.
  __device__ __forceinline__ bool locate(Params const& p, int item, int& line, int& quad) const {
    line = item;
    quad = quad_;
    if (p.quad_passes.divisor > 1) {
      int pass;
      p.quad_passes(line, pass, item);
      quad += pass * p.team_quads.divisor;
    }
    line = first_line_ + line * p.team_lines;
    return line < lines_;
  }

  __device__ __forceinline__ void load(Params const& p, int const (&origin)[kMaxAxes]) {
    int const d = p.axes[0].problem.input, h = p.axes[1].problem.input;
    int const w = p.axes[2].problem.input;
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      values_[i] = Quad();
      int line, quad, y, c = 0;
      if (!locate(p, item_ + i, line, quad)) continue;
      p.box_h(line, y, line);
      if (p.channels > 1) p.box_d(c, line, line);
      int const z = line + origin[0], x = origin[2] - lead_ + 4 * quad;
      y += origin[1];
      if (unsigned(z) >= unsigned(d) || unsigned(y) >= unsigned(h)) continue;
      T const* const source = input_ + ((int64_t(c) * d + z) * h + y) * w + x;
      if (p.vector_loads) {
        if (unsigned(x) < unsigned(w)) values_[i] = Quad::load(source);
      } else {
#pragma unroll
        for (int v = 0; v < 4; ++v) {
          if (unsigned(x + v) < unsigned(w)) values_[i].values[v] = source[v];
        }
      }
    }
  }

  // Whether there are more.
  __device__ __forceinline__ bool store(Params const& p, Team<T> const& team) {
    int line, quad;
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      if (!locate(p, item_ + i, line, quad)) return false;
      int const column = 4 * quad - lead_;
      float* const target = team.box + line * p.box[2] + column;
      float values[4];
#pragma unroll
      for (int v = 0; v < 4; ++v) values[v] = device::to_float(values_[i].values[v]);
      if (lead_ == 0 && column < p.box[2]) {
        *reinterpret_cast<float4*>(target) =
            make_float4(values[0], values[1], values[2], values[3]);
      } else {
#pragma unroll
        for (int v = 0; v < 4; ++v) {
          if (unsigned(column + v) < unsigned(p.box[2])) target[v] = values[v];
        }
      }
    }
    item_ += kQuads;
    return locate(p, item_, line, quad);
  }

  int lead_, lines_, first_line_, quad_, item_ = 0;
  T const* input_;
  Quad values_[kQuads];
};

template <int kCount, int kWide>
__device__ __forceinline__ void load_floats(float (&target)[kCount], float const* source) {
  static_assert(kCount % kWide == 0);
#pragma unroll
  for (int i = 0; i < kCount; i += kWide) {
    auto const pack = device::Pack<float, kWide>::load(source + i);
#pragma unroll
    for (int v = 0; v < kWide; ++v) target[i + v] = pack.values[v];
  }
}

// Adds the taps of a row of the filter to runs of kRows lines. row: where the first line's window
// begins; the others lie p.row_floats further each.
template <int kTaps, int kRun>
__device__ __forceinline__ void add_rows(Params const& p, float (&sums)[kRows][kRun],
                                         float const* row, float const* weights) {
  constexpr RunTaps taps = kRunTaps[kTaps];
  constexpr int kStep = kRun / taps.stride;
  constexpr int kWide = kStep % 4 == 0 ? 4 : kStep;
  constexpr int kWindow = (taps.window(kRun) + kWide - 1) / kWide * kWide;
  constexpr int kLowest = taps.lowest(kRun);
  float weight[(taps.kernel + 3) / 4 * 4];
  load_floats<(taps.kernel + 3) / 4 * 4, 4>(weight, weights);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    float window[kWindow];
    load_floats<kWindow, kWide>(window, row + i * p.row_floats);
#pragma unroll
    for (int v = 0; v < kRun; ++v) {
#pragma unroll
      for (int j = 0; j < taps.count(v); ++j) {
        sums[i][v] = fmaf(window[taps.at(v) - j - kLowest], weight[taps.first(v) + j * taps.stride],
                          sums[i][v]);
      }
    }
  }
}

// The same for outputs of any taps, those of the phase.
__device__ __forceinline__ void add_rows(Params const& p, float (&sums)[kRows][1], float const* row,
                                         float const* weights, Phase const& along) {
  row += along.shift;
  weights += along.first_tap;
  for (int j = 0; j < along.taps; ++j) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      sums[i][0] = fmaf(row[i * p.row_floats], *weights, sums[i][0]);
    }
    row -= p.axes[2].sub_dilation;
    weights += p.axes[2].tap_step;
  }
}

// Outputs that are contiguous in memory are so in shared memory, at the same offset from a multiple
// of 16 bytes.
template <class T>
struct Segments {
  static constexpr int kVector = 16 / int(sizeof(T));
  T* plane;  // of the output channel
  int depth, height, width;

  __device__ __forceinline__ int lead(int pixel) const {
    return int((reinterpret_cast<uintptr_t>(plane) / sizeof(T) + unsigned(pixel)) % kVector);
  }
  __device__ __forceinline__ int pixel(int z, int y, int x) const {
    return (z * height + y) * width + x;
  }
};

template <class T, int kValues>
__device__ __forceinline__ void stage_run(Params const& p, Team<T> const& team,
                                          Segments<T> const& to, int z, int y, int x,
                                          float const (&values)[kValues], int count) {
  Place const& place = team.place;
  int const first_y = place.origin[1] * p.axes[1].problem.stride;
  int const depth = z - place.origin[0] * p.axes[0].problem.stride;
  int const height = y - first_y, width = x - place.origin[2];
  int at;
  if (p.joined) {
    at = depth * p.segment + to.lead(to.pixel(z, first_y, 0)) + height * to.width + width;
  } else {
    at = (depth * p.extent[1] + height) * p.segment + to.lead(to.pixel(z, y, place.origin[2])) +
         width;
  }
#pragma unroll
  for (int v = 0; v < kValues; ++v) {
    if (v < count) team.staged[at + v] = device::from_float<T>(values[v]);
  }
}

template <class T>
__device__ __forceinline__ void store_segments(Params const& p, Team<T> const& team,
                                               Segments<T> const& to) {
  constexpr int kVector = Segments<T>::kVector;
  Place const& place = team.place;
  int const first_z = place.origin[0] * p.axes[0].problem.stride;
  int const first_y = place.origin[1] * p.axes[1].problem.stride;
  int const segments = p.joined ? p.extent[0] : p.extent[0] * p.extent[1];
  int const units = segments * p.segment_vectors.divisor;
#pragma unroll 1
  for (int unit = team.thread; unit < units; unit += p.team_threads) {
    int segment, at, z, y = 0;
    p.segment_vectors(segment, at, unit);
    z = segment;
    if (!p.joined) p.extent_h(z, y, segment);
    z += first_z;
    y += first_y;
    if (z >= to.depth || y >= to.height) continue;
    int const length = p.joined ? min(p.extent[1], to.height - first_y) * to.width
                                : min(p.extent[2], to.width - place.origin[2]);
    int const pixel = to.pixel(z, y, place.origin[2]);
    int const begin = at * kVector - to.lead(pixel);
    T const* const source = team.staged + segment * p.segment + at * kVector;
    T* const target = to.plane + pixel + begin;
    if (begin >= 0 && begin + kVector <= length) {
      device::Pack<T, kVector>::load(source).store(target);
    } else {
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        if (begin + v >= 0 && begin + v < length) target[v] = source[v];
      }
    }
  }
}

// Of the team's threads, in a fixed order; valid in its first thread.
__device__ __forceinline__ device::Moments merge_team(Params const& p, device::Moments value) {
  __shared__ device::Moments by_warp[kThreads / kWarp];
  value = device::merge_warp(value);
  int const warp = threadIdx.x / kWarp;
  if (threadIdx.x % kWarp == 0) by_warp[warp] = value;
  __syncthreads();
  if (threadIdx.x % p.team_threads == 0) {
    for (int i = 1; i < p.team_threads / kWarp; ++i) value.merge(by_warp[warp + i]);
  }
  return value;
}

// kTaps: index into kRunTaps, or kGeneral.
template <class T, int kTaps>
__global__ void __launch_bounds__(kThreads, 3)
    convolve_planes(__grid_constant__ Params const p, int team_bytes) {
  extern __shared__ __align__(16) unsigned char shared[];
  constexpr bool kGeneralTaps = kTaps == kGeneral;
  constexpr int kRun = kGeneralTaps ? 1 : run_of(int(sizeof(T)));
  constexpr int kStride = kRunTaps[kGeneralTaps ? 0 : kTaps].stride;
  int const number = int(threadIdx.x) / p.team_threads;
  Team<T> const team(p, shared, number, team_bytes,
                     int(blockIdx.x) * (kThreads / p.team_threads) + number);
  Place const& place = team.place;
  AxisProblem const& height = p.axes[1].problem;
  AxisProblem const& width = p.axes[2].problem;
  int const first_x = kGeneralTaps ? place.origin[2] / width.stride : place.origin[2] / kStride;
  int const origin[kMaxAxes] = {place.origin[0] + p.before[0], place.origin[1] + p.before[1],
                                first_x + p.before[2]};
  if (team.active) {
    BoxLoader<T> loader(p, team, origin);
    stage_weights(p, team);
    loader.finish(p, team, origin);
  }
  __syncthreads();

  Segments<T> to{nullptr, p.axes[0].problem.output, height.output, width.output};
  int64_t const pixels = int64_t(to.depth) * to.height * to.width;
  int const units = team.active ? p.run_count * p.row_groups.divisor * p.phases_h.divisor *
                                      p.tile[0] * p.axes[0].phases
                                : 0;
  int const end_y = min((place.origin[1] + p.tile[1]) * height.stride, height.output);
  int const end_x = min(place.origin[2] + p.tile[2], width.output);
  int const row_step = p.axes[1].sub_dilation * p.box[2];
  int const weight_step = p.axes[1].tap_step * p.kernel_w.divisor;
  int const box_channel = p.box[0] * p.box[1] * p.box[2];
  int const weight_channel = p.kernel_d.divisor * p.kernel_h.divisor * p.kernel_w.divisor;
  for (int k = 0; k < p.block_channels; ++k) {
    bool const present = team.active && team.first_channel + k < p.output_channels;
    int const channel = team.group * p.output_channels + team.first_channel + k;
    float const bias = present && p.bias != nullptr
                           ? device::to_float(static_cast<T const*>(p.bias)[channel])
                           : 0.0f;
    to.plane = static_cast<T*>(p.output) +
               (int64_t(place.sample) * p.groups * p.output_channels + channel) * pixels;
    device::ShiftedMoments moments;
    int total = 0;
#pragma unroll 1
    for (int unit = team.thread; present && unit < units; unit += p.team_threads) {
      // Units of a phase are neighbours: they have as many taps.
      int rest, run, group, depth, residue_h, residue_d;
      p.runs(rest, run, unit);
      p.row_groups(rest, group, rest);
      p.tile_d(rest, depth, rest);
      p.phases_h(residue_d, residue_h, rest);
      int const z = (place.origin[0] + depth) * p.axes[0].problem.stride + residue_d;
      int const line = place.origin[1] + group * p.group_lines;
      int const first_y = line * height.stride + residue_h;
      int const x = place.origin[2] + run * kRun;
      if (z >= to.depth || first_y >= to.height || x >= end_x) continue;
      Phase const deep = phase_of(p, 0, residue_d), high = phase_of(p, 1, residue_h);
      Phase along{};
      int column = run * (kRun / kStride);
      if constexpr (kGeneralTaps) {
        int residue_w;
        p.stride_w(column, residue_w, x);
        column -= origin[2];
        along = phase_of(p, 2, residue_w);
      }
      float values[kRows][kRun];
      clear(values);
      float const* const corner = team.box + (line + high.shift - origin[1]) * p.box[2] + column;
      float const* const corner_weights =
          team.weights + k * p.channels * weight_channel + high.first_tap * p.kernel_w.divisor;
#pragma unroll 1
      for (int j = 0; j < deep.taps; ++j) {
        int const at =
            place.origin[0] + depth + deep.shift - origin[0] - j * p.axes[0].sub_dilation;
        int const tap = deep.first_tap + j * p.axes[0].tap_step;
        float const* plane = corner + at * p.box[1] * p.box[2];
        float const* plane_weights = corner_weights + tap * p.kernel_h.divisor * p.kernel_w.divisor;
#pragma unroll 1
        for (int c = 0; c < p.channels; ++c) {
          float const* row = plane;
          float const* weights = plane_weights;
#pragma unroll 1
          for (int i = 0; i < high.taps; ++i) {
            auto const add_to = [&](float (&sums)[kRows][kRun]) {
              if constexpr (kGeneralTaps) {
                add_rows(p, sums, row, weights, along);
              } else {
                add_rows<kTaps, kRun>(p, sums, row, weights);
              }
            };
            if constexpr (kSumsRows<T>) {
              float sums[kRows][kRun];
              clear(sums);
              add_to(sums);
              add(values, sums);
            } else {
              add_to(values);
            }
            row -= row_step;
            weights += weight_step;
          }
          plane += box_channel;
          plane_weights += weight_channel;
        }
      }
#pragma unroll
      for (auto& row : values) {
#pragma unroll
        for (float& value : row) value += bias;
      }
      // Calls body(row, y, x, how many values) for rows of outputs.
      auto const for_rows = [&](auto const& body) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          int const y = first_y + i * p.row_height, at_x = x + i * p.row_width;
          if (y < end_y && at_x < end_x) body(values[i], y, at_x, min(kRun, end_x - at_x));
        }
      };
      auto const store = [&](float (&row)[kRun], int y, int at_x, int count) {
        if constexpr (!kGeneralTaps) {
          if (p.stores_runs) {
            device::Pack<T, kRun> pack;
#pragma unroll
            for (int v = 0; v < kRun; ++v) pack.values[v] = device::from_float<T>(row[v]);
            pack.store(to.plane + to.pixel(z, y, at_x));
            return;
          }
        }
        stage_run(p, team, to, z, y, at_x, row, count);
      };
      if (!p.activates_output) {
        if (p.partials != nullptr) round_as_stored<T>(values);
        for_rows(store);
      }
      if (p.activates_output || p.partials != nullptr) activate<T>(p.activation, values);
      if (p.activates_output && p.partials != nullptr) round_as_stored<T>(values);
      if (p.partials != nullptr) {
        for_rows([&](float (&row)[kRun], int, int, int count) { add(moments, total, row, count); });
      }
      if (p.activates_output) for_rows(store);
    }
    if (!p.stores_runs) {
      __syncthreads();
      if (present) store_segments(p, team, to);
      __syncthreads();
    }
    if (p.partials != nullptr) {
      device::Moments const merged = merge_team(p, moments.moments(total));
      if (present && team.thread == 0) {
        p.partials[(place.sample * p.slots + place.tile) * p.groups * p.output_channels + channel] =
            {merged.count, merged.partial()};
      }
      __syncthreads();
    }
  }
}

}  // namespace fusedconv::conv::direct
