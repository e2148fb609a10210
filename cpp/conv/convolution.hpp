// The convolution that kernels compute, and the table of kernels. No CUTLASS, no torch here.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "conv/math_table.hpp"
#include "conv/problem.hpp"
#include "fusedconv/activation.hpp"
#include "fusedconv/types.hpp"

namespace fusedconv::conv {

struct ConvArguments {
  ConvProblem problem;
  void const* input = nullptr;
  void const* filter = nullptr;
  void const* bias = nullptr;  // [K] of the output's type, or null
  void* output = nullptr;
  Activation activation = Activation::kIdentity;
  void* workspace = nullptr;  // ConvRow::workspace_bytes of them
};

// One compiled kernel. Python reads the metadata and passes back the row's index.
struct ConvRow {
  std::string name;
  std::string family;
  int architecture;  // lowest compute capability, 80 for 8.0
  int dimensions;    // spatial axes the kernel iterates: 2 or 3
  Math math;
  DType dtype;
  int tile_m, tile_n, tile_k;
  int warps;
  int stages;
  int alignment;  // channels (input and output) are a multiple of this
  int shared_bytes;
  int max_filter_extent;
  int64_t max_tensor_bytes;  // input, filter and output of one launch, each
  int teraflops;             // per second, of a full H200 on a large problem with bias and GELU
  // Sums longer than this are cut into as many parts as it takes, most_parts at most, which blocks
  // of their own take and add to the output in turn.
  int longest_sum;
  int most_parts;
  void (*launch)(ConvArguments const&, cudaStream_t);
  int64_t (*workspace_bytes)(ConvProblem const&);
};

// Every row, in a fixed order; the index is the row's identity within this build.
std::vector<ConvRow> const& conv_rows();

}  // namespace fusedconv::conv
