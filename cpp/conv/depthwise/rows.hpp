// The compiled kernels for depthwise transposed convolutions that are normalised, and how one
// serves a problem.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "conv/depthwise/schedule.hpp"
#include "conv/reading.hpp"
#include "fusedconv/device.hpp"
#include "fusedconv/groupnorm.hpp"

namespace fusedconv::conv::depthwise {

struct Config;

// y = act_after(affine(act_before(convolution + bias))) with the statistics of each sample and
// channel.
struct Arguments {
  Config const& config;
  GroupNormProblem const& norm;  // of the output: batch, activations, eps, dtypes
  void const* input = nullptr;
  void const* weight = nullptr;  // as it lies
  void const* bias = nullptr;    // [K] of the tensors' type, or null
  void const* norm_weight = nullptr;
  void const* norm_bias = nullptr;
  void* output = nullptr;
};

using Row = ReadingRow<Arguments>;

// Every row, in a fixed order.
std::vector<Row> const& rows();

// Defined by the instance files.
Row row_f32();
Row row_f16();
Row row_bf16();

struct Config : ReadingConfig<Row, Schedule> {
  int multiprocessors;

  Config(Row const& row, Problem const& problem, FilterSource const& source, Device const& device);

  // Blocks of an instance in a batch.
  int cluster(int64_t batch) const {
    return schedule.cluster(batch * problem.groups, multiprocessors);
  }
};

}  // namespace fusedconv::conv::depthwise
