// What the kernel is launched with, and the structures of its pipelines.
#pragma once

#include <algorithm>
#include <cstdint>

#include "conv/sm90/raster.hpp"
#include "conv/sm90/rows.hpp"
#include "conv/sm90/wait.hpp"
#include "cutlass/fast_math.h"
#include "fusedconv/activation.hpp"
#include "fusedconv/types.hpp"
#include "groupnorm/statistics.hpp"

namespace fusedconv::conv::sm90 {

struct Params {
  void const* input;
  unsigned char const* filter;
  void const* bias;
  void* output;
  groupnorm::Partial* partials;
  int64_t input_sample;    // elements of a sample
  int64_t channel_stride;  // of the input, elements
  int pixel_stride;
  int channels, out_channels;
  Raster raster;
  int d, h, w;
  int lower_d, lower_h, lower_w;
  int taps_w;
  int runs;  // of k-iterations whose positions are the same
  // Positions from one tap to the next; from one stage's filter rows to the next stage's.
  int tap_step_d, stage_step_h, tap_step_h, tap_step_w;
  int filter_rows_per_stage, k_blocks_per_stage;
  int staged_row_pitch, staged_positions, plane_pitch;
  bool contiguous;      // a stage's positions are one run
  bool three_by_three;  // a stage has three rows of three taps
  bool wraps;           // octets of positions may cross rows
  int input_row_elements, input_rows, tma_stages, tma_stage_bytes;
  bool tma;
  int k_iterations, stages;
  int filter_stage_bytes, input_stage_bytes;
  int kept_filter_bytes;  // 0 where it passes through the stages
  int tile_count;
  int blocks_m;  // of kBlockM output channels
  cutlass::FastDivmod tiles_n, strips, tiles_m;
  cutlass::FastDivmod iterations_h, iterations_c;  // k-iterations of a depth tap, of a run
  cutlass::FastDivmod staged_row_division;
  Activation activation;
  bool activates_output;  // else only the moments are of activated values

  static Params of(Arguments const& arguments);
};

inline Params Params::of(Arguments const& a) {
  Config const& config = a.config;
  ConvProblem const& c = config.problem;
  Schedule const& s = config.schedule;
  bool const first = config.layout == Layout::kChannelsFirst;
  int64_t const in_pixels = int64_t(c.d) * c.h * c.w;
  Params p{};
  p.input = a.input;
  p.filter = static_cast<unsigned char const*>(a.filter);
  p.bias = a.bias;
  p.output = a.output;
  p.partials = a.partials;
  p.input_sample = in_pixels * c.c;
  p.channel_stride = first ? in_pixels : 1;
  p.pixel_stride = first ? 1 : c.c;
  p.channels = c.c;
  p.out_channels = c.k;
  p.raster = Raster::of(c, s);
  p.d = c.d, p.h = c.h, p.w = c.w;
  p.lower_d = c.lower_padding_d, p.lower_h = c.lower_padding_h, p.lower_w = c.lower_padding_w;
  p.taps_w = c.s;
  p.iterations_h = cutlass::FastDivmod(c.r / s.filter_rows_per_stage);
  p.iterations_c = cutlass::FastDivmod(s.k_blocks / s.k_blocks_per_stage);
  p.runs = c.t * (c.r / s.filter_rows_per_stage);
  p.tap_step_d = c.dilation_d * s.pitch_h * s.pitch_w;
  p.tap_step_h = c.dilation_h * s.pitch_w;
  p.tap_step_w = c.dilation_w;
  p.stage_step_h = s.filter_rows_per_stage * p.tap_step_h;
  p.filter_rows_per_stage = s.filter_rows_per_stage;
  p.k_blocks_per_stage = s.k_blocks_per_stage;
  p.staged_row_pitch = s.staged_row_pitch;
  p.staged_row_division = cutlass::FastDivmod(std::max(1, s.staged_row_pitch));
  p.staged_positions = s.staged_positions;
  p.plane_pitch = s.plane_pitch;
  p.contiguous = s.staged_row_pitch == p.tap_step_h || s.filter_rows_per_stage == 1;
  p.three_by_three = s.filter_rows_per_stage == 3 && c.s == 3 && s.k_blocks_per_stage == 1;
  p.wraps = !s.linear && s.pitch_w % 8 != 0;
  p.tma = s.tma;
  p.input_row_elements = s.input_row_elements;
  p.input_rows = s.input_rows;
  p.tma_stages = s.tma_stages;
  p.tma_stage_bytes = s.tma_stage_bytes;
  p.k_iterations = s.k_iterations;
  p.stages = s.stages;
  p.filter_stage_bytes = s.filter_stage_bytes;
  p.input_stage_bytes = s.input_stage_bytes;
  p.kept_filter_bytes = config.tile().keeps_filter() ? int(s.filter_bytes) : 0;
  p.tile_count = counted_tiles(a, config.tiles());
  p.blocks_m = int(ceil_div(c.k, kBlockM));
  p.tiles_n = cutlass::FastDivmod(s.tiles_n);
  p.tiles_m = cutlass::FastDivmod(s.tiles_m);
  p.strips = cutlass::FastDivmod(s.strips);
  p.activation = a.activation;
  p.activates_output = a.activates_output;
  return p;
}

// A block's tile: positions of a strip of a sample, times output channels.
struct Tile {
  int sample, strip, n, m;
  __device__ __forceinline__ Tile(Params const& p, int tile) {
    p.tiles_m(tile, m, tile);
    p.tiles_n(tile, n, tile);
    p.strips(sample, strip, tile);
  }
};

struct alignas(16) Barriers {
  uint64_t full[kMaxStages];
  uint64_t empty[kMaxStages];
  uint64_t tma_full[kMaxStages];
  uint64_t tma_empty[kMaxStages];
  uint64_t filter;
};
static_assert(sizeof(Barriers) <= kBarrierBytes);

}  // namespace fusedconv::conv::sm90
