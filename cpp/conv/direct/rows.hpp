// The compiled kernels for transposed convolutions of few channels a group, and how one serves a
// problem.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "conv/direct/schedule.hpp"
#include "conv/reading.hpp"
#include "fusedconv/activation.hpp"
#include "fusedconv/device.hpp"
#include "fusedconv/groupnorm.hpp"
#include "groupnorm/statistics.hpp"

namespace fusedconv::conv::direct {

struct Config;

struct Arguments {
  Config const& config;
  int batch = 0;
  Activation activation = Activation::kIdentity;
  bool activates_output = true;  // else only the moments are of activated values
  void const* input = nullptr;
  void const* filter = nullptr;            // the weight as it lies
  void const* bias = nullptr;              // [K] of the tensors' type, or null
  void* output = nullptr;                  // in the input's layout
  groupnorm::Partial* partials = nullptr;  // [N, slots, K]; or null
};

using Row = ReadingRow<Arguments>;

// Every row, in a fixed order.
std::vector<Row> const& rows();

// Defined by the instance files.
Row row_f32();
Row row_f16();
Row row_bf16();

struct Config : ReadingConfig<Row, Schedule> {
  Config(Row const& row, Problem const& problem, FilterSource const& source, Device const& device);

  // How threads are laid out, for a person.
  std::string reads() const;
  // Partial moments of a channel in a sample.
  int64_t partial_slots() const { return schedule.sample_tiles(); }
};

}  // namespace fusedconv::conv::direct
