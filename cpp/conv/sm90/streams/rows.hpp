// The compiled kernels that multiply positions from registers by a filter that streams, and how one
// serves a problem.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "conv/problem.hpp"
#include "conv/sm90/streams/schedule.hpp"
#include "fusedconv/activation.hpp"

namespace fusedconv::conv::sm90::streams {

struct Config;

struct Arguments {
  Config const& config;
  int batch = 0;
  Activation activation = Activation::kIdentity;
  void const* input = nullptr;   // channels first
  void const* filter = nullptr;  // packed by pack_filter()
  void const* bias = nullptr;    // [K] of the tensors' type, or null
  float const* scale = nullptr;  // [K], or null: times the biased sum
  float const* shift = nullptr;  // [K], or null: added to that
  void* output = nullptr;        // channels first
  bool begins_early = false;     // may: what is in front releases early
};

// One compiled kernel.
struct Row {
  std::string name;
  Math math;
  Shape shape;
  void (*launch)(Arguments const&, cudaStream_t);
};

// Every row, in a fixed order.
std::vector<Row> const& rows();

// Defined by the instance file.
void append_tf32(std::vector<Row>& rows);

// How a row serves a problem of any batch size on a device.
struct Config {
  // See conv/steps.hpp.
  static constexpr bool kScales = true, kBeginsEarly = true;

  Row const* row;  // of rows()
  TransposedProblem problem;
  int multiprocessors;
  Schedule schedule;

  Config(Row const& row, TransposedProblem const& problem, Device const& device);

  AxisProblem const& axis() const { return problem.axes[kMaxAxes - 1]; }
  // How the input is read, for a person.
  std::string reads() const { return "nchw"; }
  MathTraits const& traits() const { return traits_of(row->math); }
};

// A weight [C, K, 1, 1, S], rounded to TF32, to what stages have of it: for each block of columns
// and chunk of channels both taps, of each four channels the columns.
void pack_filter(Config const& config, FilterSource const& source, void const* weight, void* filter,
                 cudaStream_t stream);

}  // namespace fusedconv::conv::sm90::streams
