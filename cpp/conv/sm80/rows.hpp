// The family's table of kernels. No CUTLASS here.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "conv/math_table.hpp"
#include "conv/problem.hpp"
#include "fusedconv/activation.hpp"

namespace fusedconv::conv::sm80 {

struct Arguments {
  ConvProblem problem;
  void const* input = nullptr;
  void const* filter = nullptr;
  void const* bias = nullptr;  // [K] of the output's type, or null
  void* output = nullptr;
  Activation activation = Activation::kIdentity;
  void* workspace = nullptr;  // Row::workspace_bytes of them
};

// One compiled kernel.
struct Row {
  std::string name;
  int architecture;  // lowest compute capability, 80 for 8.0
  int dimensions;    // spatial axes the kernel iterates: 2 or 3
  Math math;
  int tile_m, tile_n, tile_k;
  int warps;
  int stages;
  int alignment;  // channels (input and output) are a multiple of this
  int shared_bytes;
  int max_filter_extent;
  int64_t max_tensor_bytes;  // input, filter and output of one launch, each
  double efficiency;         // see row_of()
  // Sums longer than this are cut into as many parts as it takes, most_parts at most, which blocks
  // of their own take and add to the output in turn.
  int longest_sum;
  int most_parts;
  void (*launch)(Arguments const&, cudaStream_t);
  int64_t (*workspace_bytes)(ConvProblem const&);
};

// Every row, in a fixed order.
std::vector<Row> const& rows();

// Defined by the instance files, one list each.
void append_tf32(std::vector<Row>& rows);
void append_tf32x3(std::vector<Row>& rows);
void append_f16(std::vector<Row>& rows);
void append_bf16(std::vector<Row>& rows);

}  // namespace fusedconv::conv::sm80
