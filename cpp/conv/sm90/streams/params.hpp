// What the kernel is told of a launch.
#pragma once

#include <cstdint>

#include "conv/sm90/streams/rows.hpp"
#include "cutlass/fast_math.h"

namespace fusedconv::conv::sm90::streams {

struct Params {
  unsigned char const* filter;
  float const* bias;
  float const* scale;
  float const* shift;
  float* output;
  Activation activation;
  int chunks, stages, groups;
  int tile_count;  // of all samples
  int first;       // as the schedule has it
  int padding;
  int output_channels, output_length;
  // Whether neighbouring phases of a stride that is even are stored at once: both begin at whole
  // eight bytes, or each second one does, of a stride of two.
  bool pairs, late_pairs;
  cutlass::FastDivmod tiles, stride;

  static Params of(Arguments const& a) {
    Config const& config = a.config;
    Schedule const& s = config.schedule;
    AxisProblem const& axis = config.axis();
    Params p{};
    p.filter = static_cast<unsigned char const*>(a.filter);
    p.bias = static_cast<float const*>(a.bias);
    p.scale = a.scale;
    p.shift = a.shift;
    p.output = static_cast<float*>(a.output);
    p.activation = a.activation;
    p.chunks = s.chunks;
    p.stages = s.stages;
    p.groups = s.groups;
    p.tile_count = int(a.batch * int64_t(s.tiles));
    p.first = s.first;
    p.padding = axis.padding;
    p.output_channels = config.problem.output_channels;
    p.output_length = axis.output;
    bool const even = axis.stride % 2 == 0 && axis.output % 2 == 0;
    p.pairs = even && axis.padding % 2 == 0;
    p.late_pairs = even && axis.padding % 2 != 0 && axis.stride == 2;
    p.tiles = cutlass::FastDivmod(s.tiles);
    p.stride = cutlass::FastDivmod(axis.stride);
    return p;
  }
};

}  // namespace fusedconv::conv::sm90::streams
