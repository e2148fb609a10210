// Depthwise upsampling of planes to twice their size, by filters of 4 x 4: each output has two taps
// along an axis, and what a thread reads it keeps in registers. Channels first.
#pragma once

#include <cstdint>

#include "conv/direct/epilogue.hpp"
#include "conv/direct/rows.hpp"
#include "cuda/math.hpp"
#include "cutlass/fast_math.h"

namespace fusedconv::conv::direct {

inline constexpr int kDoubledTaps = 4;  // of the filter, along an axis
inline constexpr int kDoubledRows = 4;  // inputs of a thread along height
// And along width: of which the outputs are 16 bytes.
template <class T>
inline constexpr int kDoubledRun = 8 / int(sizeof(T));
static_assert(kDoubledInputs % kDoubledRun<__half> == 0);

struct DoubledParams {
  void const* input;
  void const* weight;
  void const* bias;
  void* output;
  FilterSource source;
  Activation activation;
  int height, width;
  int count;                                  // of units, a thread's each, in all
  cutlass::FastDivmod channels, units, runs;  // of a sample, of a plane, along width

  static int64_t units_of(Arguments const& a, int run) {
    Problem const& c = a.config.problem;
    int64_t const plane = int64_t(c.axes[2].input / run) * ceil_div(c.axes[1].input, kDoubledRows);
    return int64_t(a.batch) * c.groups * plane;
  }
  static DoubledParams of(Arguments const& a, int run) {
    Problem const& c = a.config.problem;
    DoubledParams p{};
    p.input = a.input;
    p.weight = a.filter;
    p.bias = a.bias;
    p.output = a.output;
    p.source = a.config.source;
    p.activation = a.activates_output ? a.activation : Activation::kIdentity;
    p.height = c.axes[1].input;
    p.width = c.axes[2].input;
    p.count = int(units_of(a, run));
    p.channels = cutlass::FastDivmod(c.groups);
    p.runs = cutlass::FastDivmod(p.width / run);
    p.units = cutlass::FastDivmod(p.width / run * int(ceil_div(p.height, kDoubledRows)));
    return p;
  }
};

// A run of a line and the input on either side of it, or zeros, which a line beyond the plane is.
template <class T>
struct DoubledLine {
  static constexpr int kRun = kDoubledRun<T>;
  float values[kRun + 2];

  // Without branches, so that all lines are under way before one is waited for: what lies outside
  // is read where a neighbour lies.
  __device__ __forceinline__ DoubledLine(T const* plane, int height, int width, int y, int x) {
    T const* const first = plane + int64_t(min(max(y, 0), height - 1)) * width + x;
    bool const inside = unsigned(y) < unsigned(height);
    bool const has_left = x > 0, has_right = x + kRun < width;
    float run[kRun];
    device::Pack<T, kRun>::load(first).to_floats(run);
    float const left = device::to_float(first[has_left ? -1 : 0]);
    float const right = device::to_float(first[has_right ? kRun : 0]);
#pragma unroll
    for (int i = 0; i < kRun; ++i) values[i + 1] = inside ? run[i] : 0.0f;
    values[0] = inside && has_left ? left : 0.0f;
    values[kRun + 1] = inside && has_right ? right : 0.0f;
  }
};

// Adds what a line gives of one row of the filter: output 2 q has taps 1 and 3 of inputs q and q -
// 1, output 2 q + 1 taps 2 and 0 of q and q + 1.
template <class T>
__device__ __forceinline__ void add_line(float (&sums)[2 * kDoubledRun<T>],
                                         DoubledLine<T> const& line,
                                         float const (&taps)[kDoubledTaps]) {
#pragma unroll
  for (int q = 0; q < kDoubledRun<T>; ++q) {
    float const* const at = line.values + q + 1;
    sums[2 * q] = fmaf(at[0], taps[1], fmaf(at[-1], taps[3], sums[2 * q]));
    sums[2 * q + 1] = fmaf(at[0], taps[2], fmaf(at[1], taps[0], sums[2 * q + 1]));
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) double_planes(__grid_constant__ DoubledParams const p) {
  constexpr int kRun = kDoubledRun<T>;
  auto const unit = unsigned(blockIdx.x) * kThreads + threadIdx.x;
  if (unit >= unsigned(p.count)) return;
  int plane, within, rows, run, sample, channel;
  p.units(plane, within, int(unit));
  p.runs(rows, run, within);
  p.channels(sample, channel, plane);
  int const x = run * kRun, y = rows * kDoubledRows;
  float taps[kDoubledTaps][kDoubledTaps];
  T const* const weight = static_cast<T const*>(p.weight) + channel * p.source.stride_c;
#pragma unroll
  for (int r = 0; r < kDoubledTaps; ++r) {
#pragma unroll
    for (int s = 0; s < kDoubledTaps; ++s) {
      taps[r][s] = device::to_float(weight[r * p.source.stride_r + s * p.source.stride_s]);
    }
  }
  float const bias = p.bias ? device::to_float(static_cast<T const*>(p.bias)[channel]) : 0.0f;
  int64_t const before = int64_t(plane) * p.height * p.width;
  T const* const input = static_cast<T const*>(p.input) + before;
  T* const output = static_cast<T*>(p.output) + 4 * before;
  auto const line_at = [&](int i) { return DoubledLine<T>(input, p.height, p.width, i, x); };
  DoubledLine<T> const lines[kDoubledRows + 2] = {line_at(y - 1), line_at(y),     line_at(y + 1),
                                                  line_at(y + 2), line_at(y + 3), line_at(y + 4)};
  dispatch_activation(p.activation, [&](auto form) {
#pragma unroll
    for (int i = 0; i < kDoubledRows; ++i) {
#pragma unroll
      for (int residue = 0; residue < 2; ++residue) {
        float sums[2 * kRun];
#pragma unroll
        for (float& sum : sums) sum = 0.0f;
        // The line itself, and the one above it or below.
        add_line(sums, lines[i + 1], taps[1 + residue]);
        add_line(sums, lines[i + 2 * residue], taps[3 - 3 * residue]);
#pragma unroll
        for (float& sum : sums) {
          sum = activated<T, decltype(form)>(sum + bias);  // which may be far larger
        }
        if (y + i >= p.height) continue;
        T* const target = output + (int64_t(2 * (y + i) + residue) * p.width + x) * 2;
        device::Pack<T, 2 * kRun>::of(sums).store(target);
      }
    }
  });
}

}  // namespace fusedconv::conv::direct
