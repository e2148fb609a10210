// What the kernel is launched with, and the structures of its pipelines.
#pragma once

#include <cstdint>

#include "conv/sm90/raster.hpp"
#include "conv/sm90/rows.hpp"
#include "cutlass/fast_math.h"
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
  bool tma;
  int input_row_elements, input_rows, tma_stages, tma_stage_bytes;
  int k_iterations, stages;
  int filter_stage_bytes, input_stage_bytes;
  int kept_filter_bytes;  // 0 where it passes through the stages
  int tile_count;
  int blocks_m;  // of kBlockM output channels
  cutlass::FastDivmod tiles_n, strips, tiles_m;
  cutlass::FastDivmod iterations_h, iterations_c;  // k-iterations of a depth tap, of a run
  cutlass::FastDivmod staged_row_division;
  Activation activation;
  // Else the convolution is stored, and only its moments are of activated values.
  bool activates_output;

  static Params of(Arguments const& arguments);
};

// A block's tile: positions of a strip of a sample, times output channels.
struct Tile {
  int sample, strip, n, m;
  __device__ __forceinline__ Tile(Params const& p, int tile) {
    p.tiles_m(tile, m, tile);
    p.tiles_n(tile, n, tile);
    p.strips(sample, strip, tile);
  }
};

struct PipelineState {
  int index = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance(int stages) {
    if (++index == stages) {
      index = 0;
      phase ^= 1;
    }
  }
  __device__ __forceinline__ void skip(int count, int stages) {
    for (int i = 0; i < count; ++i) advance(stages);
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
