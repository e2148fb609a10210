// The compiled kernels whose positions come from registers, and how one of them serves a problem.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "conv/problem.hpp"
#include "conv/sm90/runs/schedule.hpp"
#include "fusedconv/activation.hpp"
#include "fusedconv/device.hpp"
#include "fusedconv/types.hpp"
#include "groupnorm/statistics.hpp"

namespace fusedconv::conv::sm90::runs {

struct Arguments;

// One compiled kernel for each activation.
struct Row {
  std::string name;
  Math math;
  Window window;
  void (*launch)(Arguments const&, cudaStream_t);
};

// Every row, in a fixed order.
std::vector<Row> const& rows();

// Defined by the instance files.
void append_tf32(std::vector<Row>& rows);
void append_f16(std::vector<Row>& rows);
void append_bf16(std::vector<Row>& rows);

// How a row serves a problem of any batch size on a device.
struct Config {
  Row const* row;  // of rows()
  ConvProblem problem;
  int multiprocessors;
  Schedule schedule;

  // layout: of the input; aligned: its address is a multiple of 16 bytes.
  Config(Row const& row, ConvProblem const& problem, Layout layout, bool aligned,
         Device const& device);

  MathTraits const& traits() const { return traits_of(row->math); }
  int64_t partial_bytes_per_sample() const {
    return int64_t(schedule.tiles) * problem.k * int64_t(sizeof(groupnorm::Partial));
  }
};

// One launch of a row's kernel.
struct Arguments {
  Config const& config;
  int batch = 0;
  Activation activation = Activation::kIdentity;
  bool activates_output = true;  // else only the moments are of activated values
  void const* input = nullptr;
  void const* filter = nullptr;            // packed by pack_filter()
  void const* bias = nullptr;              // [K] of the tensors' type, or null
  void* output = nullptr;                  // [N, K, Z, P, Q]
  groupnorm::Partial* partials = nullptr;  // [N, tiles, K]; or null
};

}  // namespace fusedconv::conv::sm90::runs
