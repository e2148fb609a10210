// The compiled kernels that add up columns, and how one serves a problem.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "conv/problem.hpp"
#include "conv/sm90/col2im/schedule.hpp"
#include "fusedconv/activation.hpp"

namespace fusedconv::conv::sm90::col2im {

struct Config;

struct Arguments {
  Config const& config;
  int batch = 0;
  Activation activation = Activation::kIdentity;
  void const* input = nullptr;           // channels last
  void const* filter = nullptr;          // packed by pack_filter(), or the weight
  FilterSource const* weight = nullptr;  // how that lies, which the config reads as it is
  void const* bias = nullptr;            // [K] of the tensors' type, or null
  float const* scale = nullptr;          // [K], or null: times the biased sum
  float const* shift = nullptr;          // [K], or null: added to that
  void* output = nullptr;                // channels last
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

// Defined by the instance files.
void append_tf32(std::vector<Row>& rows);
void append_f16(std::vector<Row>& rows);
void append_bf16(std::vector<Row>& rows);

// How a row serves a problem of any batch size on a device.
struct Config {
  // See conv/steps.hpp.
  static constexpr bool kScales = true, kReadsWeight = true;

  Row const* row;  // of rows()
  TransposedProblem problem;
  Schedule schedule;

  Config(Row const& row, TransposedProblem const& problem, Device const& device);

  // How the input is read, for a person.
  std::string reads() const { return "nhwc"; }
  MathTraits const& traits() const { return traits_of(row->math); }
  // Whether copies read a weight that begins at a multiple of 16 bytes as it lies: of 16 bits, the
  // output channels and taps of each input channel together.
  bool reads_weight(FilterSource const& weight) const;
};

// Elements from an input channel's first output channel and tap to its last, and one.
int64_t line_of(FilterSource const& weight);

// A weight [C, K, T, R, S] to lines of taps and output channels, one for each input channel; in
// float32, rounded to TF32, to rows of input channels, one for each tap and output channel.
void pack_filter(Config const& config, FilterSource const& source, void const* weight, void* filter,
                 cudaStream_t stream);

// How a packed filter's columns lie.
FilterSource packed_source(Config const& config);

}  // namespace fusedconv::conv::sm90::col2im
