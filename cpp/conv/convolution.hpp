// The convolution that kernels compute, and the table of kernels. No CUTLASS, no torch here.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "fusedconv/types.hpp"

namespace fusedconv::conv {

// Letters, as in CUTLASS: N batch, C input channels, K output channels; D H W input, Z P Q output
// and T R S filter extents along depth, height and width.
//
// A stride-1 forward convolution of a channels-last tensor [N, D, H, W, C] with a packed filter
// [K, T, R, S, C] into [N, Z, P, Q, K]. A transposed convolution of stride 1 lowers to it with the
// filter flipped, its channel axes swapped and lower_padding = dilation (extent - 1) - padding.
struct ConvProblem {
  int n = 0, c = 0, k = 0;
  int d = 1, h = 1, w = 1;
  int z = 1, p = 1, q = 1;
  int t = 1, r = 1, s = 1;
  int lower_padding_d = 0, lower_padding_h = 0, lower_padding_w = 0;
  int dilation_d = 1, dilation_h = 1, dilation_w = 1;
};

struct ConvArguments {
  ConvProblem problem;
  void const* input = nullptr;
  void const* filter = nullptr;
  void const* bias = nullptr;  // [K] of the output's type, or null
  void* output = nullptr;
  Activation activation = Activation::kIdentity;
  void* workspace = nullptr;  // ConvRow::workspace_bytes of them
};

// How products are formed. Inputs are 4-byte floats for the first three.
enum class Math : int {
  kTf32 = 0,         // operands rounded to TF32 by the kernel
  kTf32Rounded = 1,  // operands were rounded to TF32 before
  kTf32x3 = 2,       // strict fp32: big*big + big*small + small*big
  kF16 = 3,
  kBF16 = 4,
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
  // Sums longer than this are cut into as many parts as it takes, most_parts at most, which blocks of
  // their own take and add to the output in turn.
  int longest_sum;
  int most_parts;
  void (*launch)(ConvArguments const&, cudaStream_t);
  int64_t (*workspace_bytes)(ConvProblem const&);
};

// Every row, in a fixed order; the index is the row's identity within this build.
std::vector<ConvRow> const& conv_rows();

}  // namespace fusedconv::conv
