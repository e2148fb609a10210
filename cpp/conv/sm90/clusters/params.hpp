// What the kernel is launched with, and what part of a sample a block has.
#pragma once

#include <cstdint>

#include "conv/sm90/clusters/rows.hpp"
#include "cuda/tile.hpp"
#include "cutlass/fast_math.h"

namespace fusedconv::conv::sm90::clusters {

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
  Axis axes[kMaxAxes];
  int first_phase[kMaxAxes + 1];  // of each axis in the list of all
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
  int channels, output_channels, input_pixels, output_pixels;
  int inner_inputs, inner_outputs;  // pixels of a line across the outer axis
  int outer, slabs, shares, slab, share_channels, chunk, chunks;
  int columns, taps;
  int rows, units;  // positions of a slab; tiles of products, of all phases
  int tap_rows;     // of the filter, from a tap to the next
  int box, pitch;
  // Of shared memory, in bytes: rows of the filter at 0, of pixels (another time for the next
  // chunk where copies bring those), what copies bring to be turned, sums, columns, phases.
  int input_offset, next_input, raw_offset, raw_weight_pitch, raw_input_pitch, sums_offset,
      columns_offset, phases_offset;
  bool channels_last, normalises, writes_float;
  float eps;
  Activation before, after;
  bool quick;
  DType affine_dtype;
  cutlass::FastDivmod phase_units, column_groups, phases_h, phases_w, grid_h, grid_w;
  cutlass::FastDivmod by_columns, kernel_h, kernel_w, column_blocks;

  static Params of(Arguments const& arguments);
};

// Of a sample: positions along the outer axis with all that lies across it.
struct Slab {
  int first, last;            // positions
  int first_input, inputs;    // pixels that are staged
  int first_output, outputs;  // pixels

  __device__ __forceinline__ Slab(Params const& p, int index) {
    Axis const& axis = p.axes[p.outer];
    first = index * p.slab;
    last = min(first + p.slab, axis.positions);
    int const stride = axis.problem.stride;
    first_output = first * stride * p.inner_outputs;
    outputs = min(last * stride, axis.problem.output) * p.inner_outputs - first_output;
    int begin = 0, end = axis.problem.input;
    if (p.slabs > 1) {
      begin = min(max(first + axis.lowest, 0), end);
      end = max(min(last + axis.highest, end), begin);
    }
    first_input = begin * p.inner_inputs;
    inputs = (end - begin) * p.inner_inputs;
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
  for (int i = 0; i < kMaxAxes; ++i) {
    p.axes[i] = s.axes[i];
    p.first_phase[i + 1] = p.first_phase[i] + s.axes[i].phases;
    p.input_pixels *= c.axes[i].input;
    p.output_pixels *= c.axes[i].output;
  }
  p.source = w;
  p.channels = c.channels;
  p.output_channels = c.output_channels;
  p.inner_inputs = p.input_pixels / c.axes[s.outer].input;
  p.inner_outputs = p.output_pixels / c.axes[s.outer].output;
  p.outer = s.outer;
  p.slabs = s.slabs;
  p.shares = s.shares;
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
  p.tap_rows = s.tap_rows();
  p.box = s.box;
  p.pitch = s.memory.pitch;
  p.input_offset = s.memory.input;
  p.next_input = s.memory.next_input;
  p.raw_offset = s.memory.raw;
  p.raw_weight_pitch = s.memory.raw_weight_pitch;
  p.raw_input_pitch = s.memory.raw_input_pitch;
  p.sums_offset = s.memory.sums;
  p.columns_offset = s.memory.columns;
  p.phases_offset = s.memory.phases;
  p.channels_last = c.layout == Layout::kChannelsLast;
  p.normalises = config.norm_groups > 0;
  p.writes_float = a.norm.output_dtype == DType::kFloat32;
  p.eps = float(a.norm.eps);
  p.before = a.norm.activation_before;
  p.after = a.norm.activation_after;
  p.quick = a.norm.quick();
  p.affine_dtype = a.norm.affine_dtype;
  p.by_columns = cutlass::FastDivmod(s.columns);
  p.kernel_h = cutlass::FastDivmod(c.axes[1].kernel);
  p.kernel_w = cutlass::FastDivmod(c.axes[2].kernel);
  p.column_blocks = cutlass::FastDivmod(s.column_blocks);

  // Strides along axes of one element say nothing.
  int64_t const unit = w.s > 1 ? w.stride_s : (w.r > 1 ? w.stride_r : w.stride_t);
  p.even_taps = (w.s == 1 || w.r == 1 || w.stride_r == w.s * unit) &&
                (w.r * w.s == 1 || w.t == 1 || w.stride_t == w.r * w.s * unit);
  bool const columns_first = p.even_taps && (w.k == 1 || w.stride_k == 1);
  if (columns_first) {
    p.weight_run = cutlass::FastDivmod(s.columns);
    p.outer_stride = unit;
    p.inner_stride = w.stride_k;
    p.outer_row = p.tap_rows;
    p.inner_row = 1;
  } else {
    p.weight_run = cutlass::FastDivmod(p.taps);
    p.outer_stride = w.stride_k;
    p.inner_stride = unit;
    p.outer_row = 1;
    p.inner_row = p.tap_rows;
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
  return p;
}

}  // namespace fusedconv::conv::sm90::clusters
