// What families share whose kernels read the weight as it lies. No CUDA kernels here.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "conv/math_table.hpp"
#include "conv/transposed.hpp"

namespace fusedconv::conv {

// The compiled kernels of a type.
template <class Arguments>
struct ReadingRow {
  std::string name;
  Math math;
  void (*launch)(Arguments const&, cudaStream_t);
};

// How a row serves a problem of any batch size on a device.
template <class Row_, class Schedule_>
struct ReadingConfig {
  using Row = Row_;
  using Schedule = Schedule_;

  Row const* row;  // of rows()
  TransposedProblem problem;
  FilterSource source;
  Schedule schedule;

  MathTraits const& traits() const { return traits_of(row->math); }
};

}  // namespace fusedconv::conv
