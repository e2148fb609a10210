// What the kernel is launched with, and how rows and phases belong together.
#pragma once

#include <cstdint>

#include "conv/sm90/lines/rows.hpp"
#include "cutlass/fast_math.h"

namespace fusedconv::conv::sm90::lines {

// Where a row of a warp's 16 belongs. The instruction leaves rows l and l + 8 in the same lanes:
// they are neighbouring phases of one channel, 2 m and 2 m + 1.
struct RowPlace {
  int channel;  // of the warp's
  int phase;    // from the rotation on

  FUSEDCONV_HOST_DEVICE RowPlace(int row, int stride) {
    int const low = row % 8, pairs = stride / 2;
    channel = low / pairs;
    phase = 2 * (low % pairs) + row / 8;
  }
};

struct Params {
  void const* bias;
  float const* scale;
  float const* shift;
  void* output;
  Activation activation;
  int chunks, stages, together, groups;
  int tile_count;             // of all samples
  int first, base, rotation;  // as the schedule has them
  int stride;
  int output_channels, output_length;
  bool whole;  // four outputs that are stored at once begin at whole eight bytes
  int kept_bytes, ring_bytes;
  cutlass::FastDivmod tiles;

  static Params of(Arguments const& a) {
    Config const& config = a.config;
    Schedule const& s = config.schedule;
    AxisProblem const& axis = s.axis.problem;
    Params p{};
    p.bias = a.bias;
    p.scale = a.scale;
    p.shift = a.shift;
    p.output = a.output;
    p.activation = a.activation;
    p.chunks = s.chunks;
    p.stages = s.stages;
    p.together = s.together;
    p.groups = s.groups;
    p.tile_count = int(a.batch * int64_t(s.tiles));
    p.first = s.first;
    p.base = s.base;
    p.rotation = s.rotation;
    p.stride = axis.stride;
    p.output_channels = config.problem.output_channels;
    p.output_length = axis.output;
    p.whole = axis.output % 4 == 0 && s.base % 4 == 0;
    p.kept_bytes = s.kept_bytes;
    p.ring_bytes = s.stages * kStageBytes;
    p.tiles = cutlass::FastDivmod(s.tiles);
    return p;
  }
};

}  // namespace fusedconv::conv::sm90::lines
