// What the kernel is launched with, and what part of a sample a block has.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "conv/sm90/clusters/rows.hpp"
#include "cuda/tile.hpp"
#include "cutlass/fast_math.h"

namespace fusedconv::conv::sm90::clusters {

// An axis, as blocks go along it.
struct Steps {
  int input, output, stride;
  int dilation;  // pixels from a tap of a phase to its next
  // Bytes of a pixel and of a tap in shared memory, and from a tap of a phase to its next.
  int pixel, tap, next_pixel, next_tap;
};

struct Params {
  void const* input;
  void const* weight;
  void const* bias;
  void const* norm_weight;
  void const* norm_bias;
  void* output;
  void* conv_output;
  float* mean;
  float* rstd;
  Steps steps[kMaxAxes];
  int first_phase[kMaxAxes];  // of each axis in the list of all
  FilterSource source;
  // The weight's output channels and taps, as they are copied and turned: element i of a channel's
  // is `outer` i / weight_run and `inner` i % weight_run, with strides in memory, unless taps lie
  // unevenly, and in rows.
  cutlass::FastDivmod weight_run;
  int64_t outer_stride, inner_stride;
  int outer_row, inner_row;
  bool even_taps;
  int input_bytes, weight_bytes;                    // of an access
  cutlass::FastDivmod input_pieces, weight_pieces;  // accesses of a row of what is copied
  int inputs_at_once, weights_at_once;              // rows that all threads copy together
  int channels, output_channels, input_pixels, output_pixels;
  int inner_inputs, inner_outputs;        // pixels of a line across the outer axis
  int outer, positions, lowest, highest;  // the axis of slabs: Axis
  int slabs, shares, slab, share_channels, chunk, chunks;
  int log_shares, log_blocks;
  int columns, taps;
  int rows, units;  // positions of a slab; tiles of products, of all phases
  int box, pitch;
  // Of shared memory, in bytes: rows of the filter at 0, of pixels (another time for the next
  // chunk where copies bring those), what copies bring to be turned, sums, columns, 16 bytes that
  // anything may be written to.
  int input_offset, next_input, raw_offset, raw_weight_pitch, raw_input_pitch, sums_offset,
      columns_offset, spare_offset;
  bool channels_last, normalises, writes_float;
  bool vectors;  // whether results are finished four at a time
  float eps;
  Activation before, after;
  bool quick;
  DType affine_dtype;
  cutlass::FastDivmod phase_units, column_groups, phases_h, phases_w, grid_h, grid_w;
  cutlass::FastDivmod by_columns, by_outputs, by_last_outputs;  // of a slab, of the last one
  cutlass::FastDivmod by_quads;                                 // of a chunk's channels
  cutlass::FastDivmod kernel_h, kernel_w, column_blocks;
  Phase phases[kMostPhases];

  static Params of(Arguments const& arguments);
};

// Of a warp's lanes all have the same value: what follows from it is computed once a warp.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }

// Makes the compiler keep a value, which it would compute anew in every round of a loop.
template <class Value>
__device__ __forceinline__ Value kept(Value value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Of a sample: positions along the outer axis with all that lies across it.
struct Slab {
  int first;                  // position
  int first_line, lines;      // that are staged
  int first_input, inputs;    // their pixels
  int first_output, outputs;  // pixels
  bool is_last;

  __device__ __forceinline__ Slab(Params const& p, int index) {
    Steps const& axis = p.steps[p.outer];
    first = index * p.slab;
    int const last = min(first + p.slab, p.positions);
    is_last = index == p.slabs - 1;
    first_output = first * axis.stride * p.inner_outputs;
    outputs = min(last * axis.stride, axis.output) * p.inner_outputs - first_output;
    int end = axis.input;
    first_line = 0;
    if (p.slabs > 1) {
      first_line = min(max(first + p.lowest, 0), end);
      end = max(min(last + p.highest, end), first_line);
    }
    lines = end - first_line;
    first_input = first_line * p.inner_inputs;
    inputs = lines * p.inner_inputs;
  }
};

inline Params Params::of(Arguments const& a) {
  Config const& config = a.config;
  Problem const& c = config.problem;
  Schedule const& s = config.schedule;
  FilterSource const& w = config.source;
  int const element = config.traits().element_bytes();
  Params p{};
  p.input = a.input;
  p.weight = a.weight;
  p.bias = a.bias;
  p.norm_weight = a.norm_weight;
  p.norm_bias = a.norm_bias;
  p.output = a.output;
  p.conv_output = a.conv_output;
  p.mean = a.mean;
  p.rstd = a.rstd;
  p.input_pixels = p.output_pixels = 1;
  int phases = 0;
  for (int i = 0; i < kMaxAxes; ++i) {
    p.first_phase[i] = phases;
    for (int j = 0; j < s.axes[i].phases; ++j) p.phases[phases++] = s.axes[i].phase(j);
    p.input_pixels *= c.axes[i].input;
    p.output_pixels *= c.axes[i].output;
  }
  // Wide, as what lies beyond a slab is never met.
  int64_t pixel = s.memory.pitch, tap = int64_t(s.tap_rows()) * s.memory.pitch;
  for (int i = kMaxAxes - 1; i >= 0; --i) {
    Axis const& axis = s.axes[i];
    AxisProblem const& own = c.axes[i];
    p.steps[i] = {.input = own.input,
                  .output = own.output,
                  .stride = own.stride,
                  .dilation = axis.sub_dilation,
                  .pixel = int(pixel),
                  .tap = int(tap),
                  .next_pixel = int(axis.sub_dilation * pixel),
                  .next_tap = int(axis.tap_step * tap)};
    pixel *= own.input;
    tap *= own.kernel;
  }
  p.source = w;
  p.channels = c.channels;
  p.output_channels = c.output_channels;
  p.inner_inputs = p.input_pixels / c.axes[s.outer].input;
  p.inner_outputs = p.output_pixels / c.axes[s.outer].output;
  p.outer = s.outer;
  p.positions = s.axes[s.outer].positions;
  p.lowest = s.axes[s.outer].lowest;
  p.highest = s.axes[s.outer].highest;
  p.slabs = s.slabs;
  p.shares = s.shares;
  p.log_shares = std::countr_zero(unsigned(s.shares));
  p.log_blocks = std::countr_zero(unsigned(s.blocks()));
  p.slab = s.slab;
  p.share_channels = s.share_channels;
  p.chunk = s.chunk;
  p.chunks = s.chunks;
  p.columns = s.columns;
  int grid[kMaxAxes];
  for (int i = 0; i < kMaxAxes; ++i) grid[i] = i == s.outer ? s.slab : s.axes[i].positions;
  p.rows = grid[0] * grid[1] * grid[2];
  p.grid_h = cutlass::FastDivmod(grid[1]);
  p.grid_w = cutlass::FastDivmod(grid[2]);
  int const groups = s.padded_columns / kTileColumns / s.tiles;
  int const phase_units = int(ceil_div(p.rows, kTileRows)) * groups;
  p.units = s.axes[0].phases * s.axes[1].phases * s.axes[2].phases * phase_units;
  p.phase_units = cutlass::FastDivmod(phase_units);
  p.column_groups = cutlass::FastDivmod(groups);
  p.phases_h = cutlass::FastDivmod(s.axes[1].phases);
  p.phases_w = cutlass::FastDivmod(s.axes[2].phases);
  p.taps = int(w.t * w.r * w.s);
  p.box = s.box;
  p.pitch = s.memory.pitch;
  p.input_offset = s.memory.input;
  p.next_input = s.memory.next_input;
  p.raw_offset = s.memory.raw;
  p.raw_weight_pitch = s.memory.raw_weight_pitch;
  p.raw_input_pitch = s.memory.raw_input_pitch;
  p.sums_offset = s.memory.sums;
  p.columns_offset = s.memory.columns;
  p.spare_offset = s.memory.spare;
  p.channels_last = c.layout == Layout::kChannelsLast;
  p.normalises = config.norm_groups > 0;
  p.writes_float = a.norm.output_dtype == DType::kFloat32;
  p.eps = float(a.norm.eps);
  p.before = a.norm.activation_before;
  p.after = a.norm.activation_after;
  p.quick = a.norm.quick();
  p.affine_dtype = a.norm.affine_dtype;
  p.by_columns = cutlass::FastDivmod(s.columns);
  int const outputs =  // of a slab but the last
      s.slabs > 1 ? s.slab * c.axes[s.outer].stride * p.inner_outputs : p.output_pixels;
  p.by_outputs = cutlass::FastDivmod(outputs);
  p.by_last_outputs = cutlass::FastDivmod(p.output_pixels - (s.slabs - 1) * outputs);
  p.by_quads = cutlass::FastDivmod(s.chunk / 4);
  p.kernel_h = cutlass::FastDivmod(c.axes[1].kernel);
  p.kernel_w = cutlass::FastDivmod(c.axes[2].kernel);
  p.column_blocks = cutlass::FastDivmod(s.column_blocks);

  // Four neighbours in memory: channels of a pixel, or pixels of a channel.
  p.vectors = device::is_aligned(a.output, 16) && device::is_aligned(a.conv_output, 16) &&
              (p.channels_last ? s.columns % 4 == 0 : p.output_pixels % 4 == 0 && outputs % 4 == 0);

  // Strides along axes of one element say nothing.
  int64_t const unit = w.s > 1 ? w.stride_s : (w.r > 1 ? w.stride_r : w.stride_t);
  p.even_taps = (w.s == 1 || w.r == 1 || w.stride_r == w.s * unit) &&
                (w.r * w.s == 1 || w.t == 1 || w.stride_t == w.r * w.s * unit);
  bool const columns_first = p.even_taps && (w.k == 1 || w.stride_k == 1);
  if (columns_first) {
    p.weight_run = cutlass::FastDivmod(s.columns);
    p.outer_stride = unit;
    p.inner_stride = w.stride_k;
    p.outer_row = s.tap_rows();
    p.inner_row = 1;
  } else {
    p.weight_run = cutlass::FastDivmod(p.taps);
    p.outer_stride = w.stride_k;
    p.inner_stride = unit;
    p.outer_row = 1;
    p.inner_row = s.tap_rows();
  }
  // The widest accesses that everything is a multiple of.
  auto const widest = [&](void const* base, auto const& divides) {
    for (int bytes = 16; bytes > element; bytes /= 2) {
      if (device::is_aligned(base, bytes) && divides(bytes / element)) return bytes;
    }
    return element;
  };
  p.input_bytes = widest(a.input, [&](int vector) {
    if (p.channels_last) return p.channels % vector == 0 && s.share_channels % vector == 0;
    return p.input_pixels % vector == 0 && (s.slabs == 1 || p.inner_inputs % vector == 0);
  });
  int const row = p.channels_last ? s.chunk : s.box;
  p.input_pieces = cutlass::FastDivmod(row * element / p.input_bytes);
  bool const dense = p.even_taps && !columns_first && unit == 1 && w.stride_k == p.taps;
  p.weight_bytes = widest(a.weight, [&](int vector) {
    if (w.stride_c % vector != 0) return false;
    if (dense) return s.columns * p.taps % vector == 0;
    return columns_first && s.columns % vector == 0 && (p.taps == 1 || unit % vector == 0);
  });
  p.weight_pieces = cutlass::FastDivmod(s.columns * p.taps * element / p.weight_bytes);
  p.inputs_at_once = std::max(1, kThreads / p.input_pieces.divisor);
  p.weights_at_once = std::max(1, kThreads / p.weight_pieces.divisor);
  return p;
}

}  // namespace fusedconv::conv::sm90::clusters
