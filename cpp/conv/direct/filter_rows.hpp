// Sums over the taps of outputs, row of the filter by row, from shared memory.
#pragma once

#include <utility>

#include "conv/direct/epilogue.hpp"
#include "conv/direct/params.hpp"
#include "conv/direct/taps.hpp"
#include "cuda/math.hpp"

namespace fusedconv::conv::direct {

// Of a thread at once: of kChannels output channels kRows rows of outputs of one phase along depth
// and height.
template <class T, int kTaps, int kOutputChannels>
struct Shape {
  static constexpr bool kGeneralTaps = kTaps == kGeneral;
  static constexpr int kChannels = kOutputChannels;
  static constexpr int kRun = kGeneralTaps ? 1 : run_of(int(sizeof(T)));
  static constexpr int kRows = rows_of(kRun, kChannels);
  static constexpr RunTaps kAlong = kRunTaps[kGeneralTaps ? 0 : kTaps];
  using Values = float[kChannels * kRows][kRun];
};

// In accesses as wide as the alignment of the first allows; the source has whole ones.
template <int kWide, int kCount>
__device__ __forceinline__ void load_floats(float (&target)[kCount], float const* source) {
  constexpr int kWhole = kCount / kWide * kWide;
#pragma unroll
  for (int i = 0; i < kWhole; i += kWide) {
    auto const pack = device::Pack<float, kWide>::load(source + i);
#pragma unroll
    for (int v = 0; v < kWide; ++v) target[i + v] = pack.values[v];
  }
  if constexpr (kWhole < kCount) {
    auto const pack = device::Pack<float, kWide>::load(source + kWhole);
#pragma unroll
    for (int v = kWhole; v < kCount; ++v) target[v] = pack.values[v - kWhole];
  }
}

// Adds to an output what its kCount inputs of a row of the filter give, product(tap, sum) each. Of
// one input that is no sum of its own.
template <class T, int kCount, class Product>
__device__ __forceinline__ void add_row(float& value, Product const& product) {
  if constexpr (kSumsRows<T> && kCount > 1) {
    float sum = product(0, 0.0f);
#pragma unroll
    for (int j = 1; j < kCount; ++j) sum = product(j, sum);
    value += sum;
  } else {
#pragma unroll
    for (int j = 0; j < kCount; ++j) value = product(j, value);
  }
}

// Adds the taps of a row of the filter to runs of outputs. row: where the first row's window
// begins; the others lie p.row_floats further each. The window of a row serves all channels.
template <class S, class T>
__device__ __forceinline__ void add_filter_row(Params const& p, typename S::Values& values,
                                               float const* row, float const* weights) {
  constexpr RunTaps taps = S::kAlong;
  constexpr int kStep = S::kRun / taps.stride;
  constexpr int kWide = kStep % 4 == 0 ? 4 : kStep;
  constexpr int kQuads = (taps.kernel + 3) / 4 * 4;
  float weight[S::kChannels][kQuads];
#pragma unroll
  for (int k = 0; k < S::kChannels; ++k) load_floats<4>(weight[k], weights + k * kQuads);
#pragma unroll
  for (int i = 0; i < S::kRows; ++i) {
    float window[taps.window(S::kRun)];
    load_floats<kWide>(window, row + i * p.row_floats);
#pragma unroll
    for (int k = 0; k < S::kChannels; ++k) {
      [&]<int... v>(std::integer_sequence<int, v...>) {
        (add_row<T, taps.count(v)>(values[k * S::kRows + i][v],
                                   [&](int j, float sum) {
                                     return fmaf(window[taps.at(v) - j - taps.lowest(S::kRun)],
                                                 weight[k][taps.first(v) + j * taps.stride], sum);
                                   }),
         ...);
      }(std::make_integer_sequence<int, S::kRun>{});
    }
  }
}

// The same for outputs of any taps, those of the phase.
template <class S, class T>
__device__ __forceinline__ void add_filter_row(Params const& p, typename S::Values& values,
                                               float const* row, float const* weights,
                                               Phase const& along) {
  float sums[S::kRows] = {};
  row += along.shift;
  weights += along.first_tap;
  for (int j = 0; j < along.taps; ++j) {
    float const weight = *weights;
#pragma unroll
    for (int i = 0; i < S::kRows; ++i) sums[i] = fmaf(row[i * p.row_floats], weight, sums[i]);
    row -= p.axes[2].sub_dilation;
    weights += p.axes[2].tap_step;
  }
#pragma unroll
  for (int i = 0; i < S::kRows; ++i) values[i][0] += sums[i];
}

}  // namespace fusedconv::conv::direct
