// The compiled kernels that serve a problem in one launch of clusters, and how one does.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "conv/sm90/clusters/schedule.hpp"
#include "fusedconv/activation.hpp"
#include "fusedconv/groupnorm.hpp"

namespace fusedconv::conv::sm90::clusters {

struct Config;

// y = act_after(affine(act_before(convolution + bias))). The affine map is of GroupNorm's
// statistics where the config normalises, else the scale and shift that weight and bias are; each
// may be null.
struct Arguments {
  Config const& config;
  GroupNormProblem const& norm;  // of the output: batch, activations, eps, dtypes
  void const* input = nullptr;
  void const* weight = nullptr;  // as it lies
  void const* bias = nullptr;    // [K] of the tensors' type, or null
  void const* norm_weight = nullptr;
  void const* norm_bias = nullptr;
  void* output = nullptr;       // in the input's layout
  void* conv_output = nullptr;  // likewise, before the activation; or null
  float* mean = nullptr;        // [N, groups], or null
  float* rstd = nullptr;
};

// One compiled kernel.
struct Row {
  std::string name;
  Math math;
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
  Row const* row;  // of rows()
  Problem problem;
  FilterSource source;
  int norm_groups;  // 0: none are normalised
  Schedule schedule;

  Config(Row const& row, Problem const& problem, FilterSource const& source, int norm_groups,
         Device const& device);

  MathTraits const& traits() const { return traits_of(row->math); }
};

}  // namespace fusedconv::conv::sm90::clusters
