// The taps of a run of outputs along width, known at compile time: dilation 1, and a stride that
// divides the run.
#pragma once

#include <algorithm>

namespace fusedconv::conv::direct {

// Neighbouring outputs of a thread, the first a multiple of so many: 16 bytes.
constexpr int run_of(int element_bytes) { return 16 / element_bytes; }

// Output v of a run that begins at quotient q of the stride reads, with a = padding / stride, input
// q + a + at(v) - j for its tap first(v) + j stride. residue: of the padding modulo the stride.
struct RunTaps {
  int stride, kernel, residue;

  constexpr int first(int v) const { return (v + residue) % stride; }
  constexpr int count(int v) const {
    return first(v) < kernel ? (kernel - 1 - first(v)) / stride + 1 : 0;
  }
  constexpr int at(int v) const { return v / stride + (v % stride + residue) / stride; }

  // The inputs of a run, counted from q + a.
  constexpr int lowest(int run) const {
    int result = run;
    for (int v = 0; v < run; ++v) {
      if (count(v) > 0) result = std::min(result, at(v) - (count(v) - 1));
    }
    return result;
  }
  constexpr int window(int run) const {
    int highest = 0;
    for (int v = 0; v < run; ++v) {
      if (count(v) > 0) highest = std::max(highest, at(v));
    }
    return highest + 1 - lowest(run);
  }
};

// Those that kernels are compiled for; others go output by output.
inline constexpr RunTaps kRunTaps[] = {
    {1, 3, 0}, {1, 5, 0}, {1, 7, 0}, {2, 2, 0}, {2, 3, 0}, {2, 3, 1},
    {2, 4, 0}, {2, 4, 1}, {2, 5, 0}, {2, 6, 0}, {2, 7, 1}, {4, 4, 0},
};
inline constexpr int kRunTapsCount = int(sizeof(kRunTaps) / sizeof(kRunTaps[0]));

}  // namespace fusedconv::conv::direct
