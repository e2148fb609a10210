// The compiled kernels that go down strips, and how one serves a problem.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "conv/problem.hpp"
#include "conv/sm90/strips/schedule.hpp"
#include "fusedconv/activation.hpp"

namespace fusedconv::conv::sm90::strips {

struct Config;

struct Arguments {
  Config const& config;
  int batch = 0;
  Activation activation = Activation::kIdentity;  // no other
  void const* input = nullptr;                    // channels first
  void const* filter = nullptr;                   // packed by pack_filter()
  void const* bias = nullptr;                     // [K] of the tensors' type, or null
  void* output = nullptr;                         // channels first
};

// One compiled kernel.
struct Row {
  std::string name;
  Math math;
  Reach reach;
  void (*launch)(Arguments const&, cudaStream_t);
};

// Every row, in a fixed order.
std::vector<Row> const& rows();

// Defined by the instance files.
void append_f16(std::vector<Row>& rows);
void append_bf16(std::vector<Row>& rows);

// How a row serves a problem of any batch size on a device.
struct Config {
  Row const* row;  // of rows()
  ConvProblem problem;
  int multiprocessors;
  int64_t line;  // elements from one line of the input to the next
  Schedule schedule;

  // As runs::Config has them.
  Config(Row const& row, ConvProblem const& problem, Layout layout, bool aligned, bool padded_lines,
         Device const& device);

  // How the input is read, for a person.
  std::string reads() const { return "nchw, TMA"; }
  MathTraits const& traits() const { return traits_of(row->math); }
};

// A weight [C, K, 1, 3, 3], taps reversed, to what the threads of a warpgroup keep.
void pack_filter(Config const& config, FilterSource const& source, void const* weight, void* filter,
                 cudaStream_t stream);

}  // namespace fusedconv::conv::sm90::strips
