// What the kernel is launched with.
#pragma once

#include <cstdint>

#include "conv/depthwise/rows.hpp"
#include "cutlass/fast_math.h"
#include "groupnorm/affine.hpp"

namespace fusedconv::conv::depthwise {

struct Params {
  void const* input;  // [instances, depth, height, width]
  void const* weight;
  void const* bias;
  void* output;
  groupnorm::Affine affine;  // of weight and bias alone, and activations
  float eps;
  FilterSource source;
  int input_extent[kMaxAxes], output_extent[kMaxAxes];
  int parts, cluster, block_parts;  // block_parts: of the parts of an instance, a block's
  int part_begin[kMostParts + 1];   // planes of the input
  int lines, tiles;
  int slot_elements, span_elements, slots, buffers;
  cutlass::FastDivmod runs, pitch, channels;

  static Params of(Arguments const& a, int cluster) {
    Config const& config = a.config;
    Schedule const& s = config.schedule;
    Problem const& c = config.problem;
    Params p{};
    p.input = a.input;
    p.weight = a.weight;
    p.bias = a.bias;
    p.output = a.output;
    p.affine = groupnorm::affine_of(a.norm, a.norm_weight, a.norm_bias, nullptr);
    p.eps = float(a.norm.eps);
    p.source = config.source;
    for (int i = 0; i < kMaxAxes; ++i) {
      p.input_extent[i] = c.axes[i].input;
      p.output_extent[i] = c.axes[i].output;
    }
    p.parts = s.parts;
    p.cluster = cluster;
    p.block_parts = s.parts / cluster;
    for (int i = 0; i <= s.parts; ++i) p.part_begin[i] = s.first_plane(i, c);
    p.lines = s.lines;
    p.tiles = s.tiles;
    p.slot_elements = s.slot_elements;
    p.span_elements = s.span_elements;
    p.slots = s.slots;
    p.buffers = s.buffers;
    p.runs = cutlass::FastDivmod(s.runs);
    p.pitch = cutlass::FastDivmod(s.pitch);
    p.channels = cutlass::FastDivmod(c.groups);
    return p;
  }
};

}  // namespace fusedconv::conv::depthwise
