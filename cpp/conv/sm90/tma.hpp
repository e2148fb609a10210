// Tensor maps, of inputs and of what copies store.
#pragma once

#include <cuda.h>

#include <array>
#include <string>

#include "conv/math_table.hpp"
#include "conv/problem.hpp"
#include "conv/sm90/rows.hpp"

namespace fusedconv::conv::sm90 {

// Axes, innermost first, with their distances in bytes but the innermost's.
struct MapAxes {
  std::array<cuuint64_t, 5> extents;
  std::array<cuuint64_t, 4> strides;
  std::array<cuuint32_t, 5> box;
  CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_NONE;
};

// Fills `map`, if its status is CUDA_SUCCESS. Copies round to TF32 on the way where `math` does.
CUresult try_encode_map(Math math, void const* tensor, MapAxes const& axes, CUtensorMap& map);

// Throws KernelFailure, which names the row and the problem. Copies round to TF32 on the way where
// `math` does.
CUtensorMap encode_map(Math math, void const* input, MapAxes const& axes, std::string const& row,
                       ConvProblem const& problem, int batch);

// The input as a tensor of five axes, for boxes of one row of a k-block.
CUtensorMap input_map(Arguments const& arguments);

}  // namespace fusedconv::conv::sm90
