// The compiled kernels whose positions come from registers, and how one of them serves a problem.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "conv/problem.hpp"
#include "conv/sm90/arguments.hpp"
#include "conv/sm90/runs/schedule.hpp"
#include "conv/sm90/runs/tile_partial.hpp"
#include "fusedconv/device.hpp"
#include "fusedconv/types.hpp"

namespace fusedconv::conv::sm90::runs {

struct Config;
// The output is [N, K, Z, P, Q].
using Arguments = ConvolveArguments<Config, TilePartial>;

// One compiled kernel for each activation.
struct Row {
  std::string name;
  Math math;
  Window window;
  bool interleaves;  // sub-pixel phases, which are output channels of its problems
  void (*launch)(Arguments const&, cudaStream_t);
};

// Every row, in a fixed order.
std::vector<Row> const& rows();

// Defined by the instance files.
void append_tf32(std::vector<Row>& rows);
void append_tf32x3(std::vector<Row>& rows);
void append_f16(std::vector<Row>& rows);
void append_bf16(std::vector<Row>& rows);

// How a row serves a problem of any batch size on a device.
struct Config {
  Row const* row;  // of rows()
  ConvProblem problem;
  Phases phases;  // of problem.k; one unless the row interleaves
  int multiprocessors;
  int64_t line;  // elements from one line of the input to the next
  Schedule schedule;

  // layout: of the input; aligned: its address is a multiple of 16 bytes; padded_lines: its lines
  // are padded to the next multiple of 16 bytes.
  Config(Row const& row, ConvProblem const& problem, Phases const& phases, Layout layout,
         bool aligned, bool padded_lines, Device const& device);

  // How the input is read, for a person.
  std::string reads() const { return "nchw, TMA"; }
  MathTraits const& traits() const { return traits_of(row->math); }
  // By tile, channel and phase along depth and height; phases along width are of one.
  int64_t partial_bytes_per_sample() const {
    return int64_t(schedule.tiles) * (problem.k / phases.w.count) * int64_t(sizeof(TilePartial));
  }
};

// The extents of a problem's weight, and the channels of its output.
inline FilterSource weight_of(Config const& config) {
  ConvProblem const& p = config.problem;
  if (!config.row->interleaves) return {.c = p.c, .k = p.k, .t = p.t, .r = p.r, .s = p.s};
  Phases const& phases = config.phases;
  return {.c = p.c,
          .k = p.k / phases.all(),
          .t = phases.d.kernel,
          .r = phases.h.kernel,
          .s = phases.w.kernel};
}
inline int64_t output_channels_of(Config const& config) {
  return config.problem.k / config.phases.all();
}

}  // namespace fusedconv::conv::sm90::runs
