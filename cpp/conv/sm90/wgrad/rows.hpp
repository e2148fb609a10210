// The compiled kernels of the weight gradient, and how one of them serves a problem.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "conv/problem.hpp"
#include "conv/sm90/wgrad/schedule.hpp"
#include "fusedconv/device.hpp"
#include "fusedconv/types.hpp"

namespace fusedconv::conv::sm90::wgrad {

struct Config;

// The input [N, C, D, H, W] and the output's gradient [N, K, Z, P, Q], dense but for lines, which
// are padded to kLineAlignment bytes. partials: schedule.partial_bytes.
struct Arguments {
  Config const& config;
  void const* input = nullptr;
  void const* grad_output = nullptr;
  float* partials = nullptr;
};

// One compiled kernel for each number of a filter's rows.
struct Row {
  std::string name;
  Math math;
  int filter_rows;
  void (*launch)(Arguments const&, cudaStream_t);
};

// Every row, in a fixed order.
std::vector<Row> const& rows();

// Defined by the instance files.
void append_tf32(std::vector<Row>& rows);
void append_tf32x3(std::vector<Row>& rows);
void append_f16(std::vector<Row>& rows);
void append_bf16(std::vector<Row>& rows);

// How a row serves a problem of a given batch on a device.
struct Config {
  Row const* row;  // of rows()
  ConvProblem problem;
  Schedule schedule;

  Config(Row const& row, ConvProblem const& problem, Layout layout, Device const& device);

  MathTraits const& traits() const { return traits_of(row->math); }
};

}  // namespace fusedconv::conv::sm90::wgrad
