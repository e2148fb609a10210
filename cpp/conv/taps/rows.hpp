// The compiled kernels for transposed convolutions of any stride, and how one serves a problem.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "conv/taps/schedule.hpp"
#include "fusedconv/activation.hpp"
#include "fusedconv/device.hpp"
#include "groupnorm/statistics.hpp"

namespace fusedconv::conv::taps {

struct Config;

struct Arguments {
  Config const& config;
  int batch = 0;
  Activation activation = Activation::kIdentity;
  bool activates_output = true;  // else only the moments are of activated values
  void const* input = nullptr;
  void const* filter = nullptr;            // packed by pack_filter()
  void const* bias = nullptr;              // [K] of the tensors' type, or null
  void* output = nullptr;                  // in the input's layout
  groupnorm::Partial* partials = nullptr;  // [N, slots, K]; or null
  float const* scale = nullptr;            // [K]: (convolution + bias) * scale + shift is activated
  float const* shift = nullptr;            // [K]; either may be null
};

// One compiled kernel for each way of reading the input.
struct Row {
  std::string name;
  Math math;
  int groups;  // row groups of a block
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
  static constexpr bool kScales = true;  // its Arguments have scale and shift

  Row const* row;  // of rows()
  Problem problem;
  Schedule schedule;

  Config(Row const& row, Problem const& problem, Device const& device);

  // How the input is read, for a person.
  std::string reads() const;
  MathTraits const& traits() const { return traits_of(row->math); }
  // Partial moments of a channel in a sample.
  int64_t partial_slots() const;
};

}  // namespace fusedconv::conv::taps
