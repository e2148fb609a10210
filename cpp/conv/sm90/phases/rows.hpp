// The compiled kernels that sum all phases of a box at once, and how one serves a problem.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "conv/problem.hpp"
#include "conv/sm90/phases/schedule.hpp"
#include "fusedconv/activation.hpp"
#include "fusedconv/groupnorm.hpp"
#include "groupnorm/statistics.hpp"

namespace fusedconv::conv::sm90::phases {

struct Config;

struct Arguments {
  Config const& config;
  int batch = 0;
  Activation activation = Activation::kIdentity;
  void const* input = nullptr;   // channels last, as all pixels
  void const* filter = nullptr;  // packed by pack_filter()
  void const* bias = nullptr;    // [K] of the tensors' type, or null
  float const* scale = nullptr;  // [K], or null: times the biased sum
  float const* shift = nullptr;  // [K], or null: added to that
  int own_channels = 0;          // K, or 0: those of the output's pixels, which may be padded
  void* output = nullptr;
  // GroupNorm behind the biased sum, in front of the activation, by statistics of [N, groups].
  GroupNormProblem const* norm = nullptr;
  groupnorm::Statistics const* statistics = nullptr;
  void const* norm_weight = nullptr;
  void const* norm_bias = nullptr;
  // Moments of biased sums: [N, slots, K], or null. Then nothing is activated or stored.
  groupnorm::Partial* partials = nullptr;
  bool activates_output = true;  // there then is none
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

// Defined by the instance files.
void append_f16(std::vector<Row>& rows);
void append_bf16(std::vector<Row>& rows);

// How a row serves a problem of any batch size on a device.
struct Config {
  // See conv/steps.hpp.
  static constexpr bool kScales = true, kPadsChannels = true, kBeginsEarly = true;

  Row const* row;  // of rows()
  TransposedProblem problem;
  int multiprocessors;
  Schedule schedule;

  Config(Row const& row, TransposedProblem const& problem, Device const& device);

  // How the input is read, for a person.
  std::string reads() const { return "nhwc"; }
  MathTraits const& traits() const { return traits_of(row->math); }
  // Partial moments of a channel in a sample.
  int64_t partial_slots() const { return int64_t(schedule.parts) * row->shape.consumers(); }
};

// A weight [C, K, T, R, S] to what the instructions read: for each block of channels and each round
// the columns of each product.
void pack_filter(Config const& config, FilterSource const& source, void const* weight, void* filter,
                 cudaStream_t stream);

}  // namespace fusedconv::conv::sm90::phases
