// The compiled kernels for transposed convolutions of few input channels, and how one serves a
// problem.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "conv/few/schedule.hpp"
#include "conv/reading.hpp"
#include "fusedconv/activation.hpp"
#include "fusedconv/device.hpp"
#include "fusedconv/groupnorm.hpp"
#include "groupnorm/statistics.hpp"

namespace fusedconv::conv::few {

struct Config;

// A pass. Where it takes moments, of activated values, what it may store is before the activation;
// else it stores activated values, normalised by statistics where there are.
struct Arguments {
  Config const& config;
  int batch = 0;
  Activation activation = Activation::kIdentity;
  bool rounds = false;  // sums of 16 bits as they are stored, as those are that are saved
  void const* input = nullptr;
  void const* weight = nullptr;            // as it lies
  void const* bias = nullptr;              // [K] of the tensors' type, or null
  void* output = nullptr;                  // null for moments alone
  groupnorm::Partial* partials = nullptr;  // [N, slots, K]; or null
  GroupNormProblem const* norm = nullptr;
  groupnorm::Statistics const* statistics = nullptr;
  void const* norm_weight = nullptr;
  void const* norm_bias = nullptr;
};

using Row = ReadingRow<Arguments>;

// Every row, in a fixed order.
std::vector<Row> const& rows();

// Defined by the instance files.
Row row_tf32();
Row row_f16();
Row row_bf16();

struct Config : ReadingConfig<Row, Schedule> {
  Config(Row const& row, Problem const& problem, FilterSource const& source, Device const& device);

  std::string reads() const { return "nchw"; }
  // Partial moments of a channel in a sample.
  int64_t partial_slots() const { return schedule.sample_tiles(); }
};

}  // namespace fusedconv::conv::few
