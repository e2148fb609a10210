// The compiled kernels of the weight gradient, and how one of them serves a problem.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "conv/sm90/boxes/weight/schedule.hpp"

namespace fusedconv::conv::sm90::boxes::weight {

struct Config;

// The input and the output's gradient, dense and channels last; the input packed by pack_input()
// where the row's block packs. partials: schedule.partial_bytes.
struct Arguments {
  Config const& config;
  void const* input = nullptr;
  void const* grad_output = nullptr;
  float* partials = nullptr;
  // In place of partial sums, where the config writes a gradient that lies so.
  void* grad_weight = nullptr;
  FilterSource const* weight = nullptr;
  // Of so many output channels schedule.bias_parts each, where the config sums the bias.
  float* bias_sums = nullptr;
  int bias_channels = 0;
};

// One compiled kernel.
struct Row {
  std::string name;
  Math math;
  Block block;
  void (*launch)(Arguments const&, cudaStream_t);
};

// Every row, in a fixed order.
std::vector<Row> const& rows();

// Defined by the instance files.
void append_tf32(std::vector<Row>& rows);
void append_f16(std::vector<Row>& rows);
void append_bf16(std::vector<Row>& rows);

// How a row serves a problem of a given batch on a device.
struct Config {
  static constexpr bool kPadsChannels = true;  // see conv/steps.hpp

  Row const* row;  // of rows()
  Problem problem;
  int64_t batch;
  Schedule schedule;

  // problem: as schedule_of() takes it.
  Config(Row const& row, Problem const& problem, int64_t batch, Device const& device);

  MathTraits const& traits() const { return traits_of(row->math); }
  // Whether the row sums the bias's gradient on the way.
  bool sums_bias() const { return row->block.sums_bias() && schedule.reads_once; }
  // Whether the row writes the gradient itself, as a block has all positions of its task, and lines
  // of the weight's output channels: of one that begins at a whole pair.
  static constexpr int kPair = 2;
  bool writes(FilterSource const& weight) const;
};

}  // namespace fusedconv::conv::sm90::boxes::weight
