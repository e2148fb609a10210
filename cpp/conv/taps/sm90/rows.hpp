// The compiled kernels of warpgroup products, and how one serves a problem.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "conv/taps/rows.hpp"
#include "conv/taps/sm90/schedule.hpp"

namespace fusedconv::conv::taps::sm90 {

struct Config;

struct Arguments {
  Config const& config;
  int batch = 0;
  Activation activation = Activation::kIdentity;
  bool activates_output = true;  // else only the moments are of activated values
  void const* input = nullptr;
  void const* filter = nullptr;            // packed by pack_filter()
  void const* bias = nullptr;              // [K] of the tensors' type, or null
  float const* scale = nullptr;            // [K], or null: times the biased sum
  float const* shift = nullptr;            // [K], or null: added to that
  void* output = nullptr;                  // in the input's layout
  groupnorm::Partial* partials = nullptr;  // [N, slots, K]; or null
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
void append_tf32x3(std::vector<Row>& rows);
void append_f16(std::vector<Row>& rows);
void append_bf16(std::vector<Row>& rows);

// How a row serves a problem of any batch size on a device.
struct Config {
  static constexpr bool kScales = true;  // see conv/steps.hpp

  Row const* row;  // of rows()
  Problem problem;
  int multiprocessors;
  Schedule schedule;

  Config(Row const& row, Problem const& problem, Device const& device);

  // How the input is read, for a person.
  std::string reads() const;
  MathTraits const& traits() const { return traits_of(row->math); }
  // Whether tiles go over the borders of samples, where nobody wants moments of each.
  bool joins_samples(bool moments) const;
  int64_t tiles(int64_t batch, bool moments) const;
  // Blocks of a cluster, which share the channels of one tile's input where a sample's tiles are
  // too few for all multiprocessors; a power of two. The batch has no say, or a sample's sums would
  // depend on it.
  int splits() const;
  // Partial moments of a channel in a sample.
  int64_t partial_slots() const;
};

}  // namespace fusedconv::conv::taps::sm90
