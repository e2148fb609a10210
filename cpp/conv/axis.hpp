// Sub-pixel phases of a transposed convolution along one axis, for the processor and the GPU alike.
//
// Output o sums weight[k] input[i] over o = stride i + dilation k - padding. Outputs of one residue
// modulo the stride, o = residue + stride q, are a phase: with g = gcd(dilation, stride), its taps
// are k = first_tap + j stride / g for j = 0, 1, ..., and tap j meets input q + shift - j dilation
// / g. Where g does not divide residue + padding, there are none.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#ifdef __CUDACC__
#define FUSEDCONV_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FUSEDCONV_HOST_DEVICE inline
#endif

namespace fusedconv::conv {

inline constexpr int kMaxStride = 1 << 15;  // products of two fit an int

// What torch's modules call input and output size, kernel_size, stride, padding and dilation.
struct AxisProblem {
  int input = 1;
  int output = 1;
  int kernel = 1;
  int stride = 1;
  int padding = 0;
  int dilation = 1;
};

struct Phase {
  int outputs = 0;
  int taps = 0;
  int first_tap = 0;
  int shift = 0;
};

struct Axis {
  AxisProblem problem;
  int divisor = 1;       // gcd of dilation and stride
  int tap_step = 1;      // from a tap of a phase to its next
  int sub_dilation = 1;  // by which its input position is less
  int inverse = 0;       // of sub_dilation modulo tap_step
  // Over all phases that have outputs:
  int phases = 1;
  int positions = 1;                        // outputs of the first, which has the most
  int taps = 0;                             // most of any
  int lowest = 0, highest = 0;              // input position less q that a tap meets
  int lowest_shift = 0, highest_shift = 0;  // of those with taps

  static Axis of(AxisProblem const& problem);

  FUSEDCONV_HOST_DEVICE Phase phase(int residue) const {
    Phase result;
    if (residue < problem.output) {
      result.outputs = (problem.output - residue - 1) / problem.stride + 1;
    }
    int const reached = residue + problem.padding;
    if (reached % divisor != 0) return result;
    result.first_tap = reached / divisor % tap_step * inverse % tap_step;
    if (result.first_tap >= problem.kernel) return result;
    result.taps = (problem.kernel - 1 - result.first_tap) / tap_step + 1;
    // Exact: the numerator is a multiple of the stride, and may be negative.
    result.shift = (reached - problem.dilation * result.first_tap) / problem.stride;
    return result;
  }
};

inline Axis Axis::of(AxisProblem const& problem) {
  Axis axis;
  axis.problem = problem;
  axis.divisor = std::gcd(problem.dilation, problem.stride);
  axis.tap_step = problem.stride / axis.divisor;
  axis.sub_dilation = problem.dilation / axis.divisor;
  while (axis.tap_step > 1 && int64_t(axis.inverse) * axis.sub_dilation % axis.tap_step != 1) {
    ++axis.inverse;
  }
  axis.phases = std::min(problem.stride, problem.output);
  axis.positions = axis.phase(0).outputs;
  bool found = false;
  for (int residue = 0; residue < axis.phases; ++residue) {
    Phase const phase = axis.phase(residue);
    if (phase.taps == 0) continue;
    int const lowest = phase.shift - (phase.taps - 1) * axis.sub_dilation;
    axis.taps = std::max(axis.taps, phase.taps);
    axis.lowest = found ? std::min(axis.lowest, lowest) : lowest;
    axis.highest = found ? std::max(axis.highest, phase.shift) : phase.shift;
    axis.lowest_shift = found ? std::min(axis.lowest_shift, phase.shift) : phase.shift;
    axis.highest_shift = axis.highest;
    found = true;
  }
  return axis;
}

}  // namespace fusedconv::conv
