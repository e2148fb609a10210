// What the kernel is launched with.
#pragma once

#include <cstdint>

#include "conv/few/rows.hpp"
#include "cutlass/fast_math.h"
#include "groupnorm/affine.hpp"

namespace fusedconv::conv::few {

// Whether SiLU may be in its rough form, in both passes alike: of what is normalised in bfloat16,
// but for a backward pass, which computes it anew of what is saved.
template <Math kMath>
bool is_rough(Arguments const& a) {
  bool const normalises = a.partials != nullptr || a.norm != nullptr;
  bool const saves = a.partials != nullptr && a.output != nullptr;
  return kMath == Math::kBF16 && a.activation == Activation::kSilu && normalises && !a.rounds &&
         !saves;
}

struct Params {
  void const* input;
  void const* weight;
  void const* bias;
  void* output;
  groupnorm::Partial* partials;
  groupnorm::Affine affine;  // behind the activation, where it has statistics
  Activation activation;
  bool rounds, rough, vectors;
  int channels, output_channels;
  int64_t stride_c, stride_k, stride_t, stride_r, stride_s;  // of the weight
  int input_extent[kMaxAxes], output_extent[kMaxAxes], shift[kMaxAxes];
  int64_t input_pixels, output_pixels;
  int lines, planes, tiles_d, width_tiles, box_columns, box_lines, staged_channel, staged_elements,
      buffers;
  int unit_lines, unit_widths;  // from a unit of a warp to its next, as lines and parts of these
  int box_bytes, operand_bytes;
  cutlass::FastDivmod tiles_h, depth_tiles, channel_blocks, columns, widths;

  template <Math kMath>
  static Params of(Arguments const& a) {
    Config const& config = a.config;
    Schedule const& s = config.schedule;
    Problem const& c = config.problem;
    Params p{};
    p.input = a.input;
    p.weight = a.weight;
    p.bias = a.bias;
    p.output = a.output;
    p.partials = a.partials;
    if (a.norm != nullptr) {
      p.affine = groupnorm::affine_of(*a.norm, a.norm_weight, a.norm_bias, a.statistics);
    }
    p.activation = a.activation;
    p.rounds = a.rounds;
    p.rough = is_rough<kMath>(a);
    p.vectors = s.vectors;
    p.channels = c.channels;
    p.output_channels = c.output_channels;
    p.stride_c = config.source.stride_c;
    p.stride_k = config.source.stride_k;
    p.stride_t = config.source.stride_t;
    p.stride_r = config.source.stride_r;
    p.stride_s = config.source.stride_s;
    p.input_pixels = p.output_pixels = 1;
    for (int i = 0; i < kMaxAxes; ++i) {
      p.input_extent[i] = c.axes[i].input;
      p.output_extent[i] = c.axes[i].output;
      p.shift[i] = s.shift[i];
      p.input_pixels *= c.axes[i].input;
      p.output_pixels *= c.axes[i].output;
    }
    p.lines = s.lines;
    p.planes = s.planes;
    p.width_tiles = s.width_tiles;
    p.box_columns = s.box_columns;
    p.box_lines = s.box_lines;
    p.staged_channel = s.staged_channel;
    p.staged_elements = s.staged_elements;
    p.buffers = s.buffers;
    p.unit_lines = kWarps / s.width_tiles;
    p.unit_widths = kWarps % s.width_tiles;
    p.box_bytes = s.box_bytes;
    p.operand_bytes = s.operand_bytes;
    p.tiles_h = cutlass::FastDivmod(s.tiles[1]);
    p.depth_tiles = cutlass::FastDivmod(s.tiles[0]);
    p.channel_blocks = cutlass::FastDivmod(s.channel_blocks);
    p.columns = cutlass::FastDivmod(s.box_columns);
    p.widths = cutlass::FastDivmod(s.width_tiles);
    return p;
  }
};

}  // namespace fusedconv::conv::few
