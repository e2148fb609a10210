// What a warp multiplies: tiles of neighbouring output positions of one phase by output channels,
// over the phase's taps and the chunk's input channels.
#pragma once

#include <cstdint>

#include "conv/mma_sync.hpp"
#include "conv/sm90/clusters/params.hpp"

namespace fusedconv::conv::sm90::clusters {

// Steps of a split product that the tensor cores add up: what they drop of longer sums would exceed
// the error of eager's.
inline constexpr int kSplitSteps = 2;

// The phases of all axes, by axis, in shared memory.
__device__ __forceinline__ void list_phases(Params const& p, Phase* phases) {
  int const index = int(threadIdx.x);
  int const axis = (index >= p.first_phase[1]) + (index >= p.first_phase[2]);
  if (index < p.first_phase[kMaxAxes]) {
    phases[index] = p.axes[axis].phase(index - p.first_phase[axis]);
  }
}

// A position of a slab, by axis: any phase's that has so many outputs. Of a row beyond the last one
// none.
struct Position {
  int at[kMaxAxes];

  __device__ __forceinline__ Position(Params const& p, Slab const& slab, int row) {
    int line;
    p.grid_w(line, at[2], row);
    p.grid_h(at[0], at[1], line);
#pragma unroll
    for (int i = 0; i < kMaxAxes; ++i) at[i] += i == p.outer ? slab.first : 0;
  }
};

// Floats to TF32.
template <int kCount>
__device__ __forceinline__ void round(uint32_t (&words)[kCount]) {
#pragma unroll
  for (uint32_t& word : words) {
    word = __float_as_uint(device::round_to_tf32(__uint_as_float(word)));
  }
}

// Adds the products of kSteps steps, whose operands are all on their way before the first product.
template <Math kMath, int kTiles, int kSteps>
__device__ __forceinline__ void multiply_steps(float (&sums)[kTiles][4],
                                               unsigned char const* pixels,
                                               unsigned char const* filter, int pitch) {
  using Mma = typename Instruction<kMath>::Mma;
  constexpr bool kSplits = kMath == Math::kTf32x3;
  constexpr int kTilesOfLoad = kTiles == 1 ? 1 : 2;
  constexpr int kLoads = kTiles / kTilesOfLoad;
  uint32_t a[kSteps][4], b[kSteps][kLoads][2 * kTilesOfLoad];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    load_matrices(a[k], pixels + k * kStepBytes);
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      load_matrices(b[k][j], filter + k * kStepBytes + j * kTilesOfLoad * kTileColumns * pitch);
    }
  }
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    uint32_t small_a[4], small_b[2 * kTilesOfLoad];
    if constexpr (kSplits) split(a[k], small_a);
    if constexpr (kMath == Math::kTf32) round(a[k]);
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      if constexpr (kSplits) split(b[k][j], small_b);
      if constexpr (kMath == Math::kTf32) round(b[k][j]);
#pragma unroll
      for (int e = 0; e < kTilesOfLoad; ++e) {
        float (&sum)[4] = sums[j * kTilesOfLoad + e];
        auto const add = [&](uint32_t const(&x)[4], uint32_t const* y) {
          Mma::fma(sum[0], sum[1], sum[2], sum[3], x[0], x[1], x[2], x[3], y[2 * e], y[2 * e + 1],
                   sum[0], sum[1], sum[2], sum[3]);
        };
        if constexpr (kSplits) {
          add(small_a, b[k][j]);
          add(a[k], small_b);
        }
        add(a[k], b[k][j]);
      }
    }
  }
}

// Adds the products of one tap.
template <Math kMath, int kTiles>
__device__ __forceinline__ void multiply_tap(float (&sums)[kTiles][4], unsigned char const* pixels,
                                             unsigned char const* filter, int pitch, int steps) {
  if constexpr (kMath == Math::kTf32x3) {
#pragma unroll 1
    for (int first = 0; first < steps; first += kSplitSteps) {
      float part[kTiles][4] = {};
#pragma unroll
      for (int k = 0; k < kSplitSteps; ++k) {
        if (first + k >= steps) break;
        int const at = (first + k) * kStepBytes;
        multiply_steps<kMath, kTiles, 1>(part, pixels + at, filter + at, pitch);
      }
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[j][e] += part[j][e];
      }
    }
  } else {
#pragma unroll 1
    for (int k = 0; k < steps / 2; ++k) {
      int const at = k * 2 * kStepBytes;
      multiply_steps<kMath, kTiles, 2>(sums, pixels + at, filter + at, pitch);
    }
    if (steps % 2 != 0) {
      int const at = (steps - 1) * kStepBytes;
      multiply_steps<kMath, kTiles, 1>(sums, pixels + at, filter + at, pitch);
    }
  }
}

// Adds a chunk's products to `sums`, or makes them those if it is the first: by output channel and
// pixel of the slab in the tensors' layout. `steps` of the chunk have channels.
template <Math kMath, int kTiles>
__device__ __forceinline__ void multiply(Params const& p, Slab const& slab,
                                         unsigned char const* shared, unsigned char const* rows,
                                         Phase const* phases, float* sums, int steps,
                                         bool is_first) {
  int const lane = threadIdx.x % 32;
  unsigned char const* const pixels = rows + lane / 16 * 16;
  unsigned char const* const filter =
      shared + lane / 8 % 2 * 16 + (kTiles == 1 ? lane % 8 : lane / 16 * 8 + lane % 8) * p.pitch;
#pragma unroll 1
  for (int unit = int(threadIdx.x) / 32; unit < p.units; unit += kWarps) {
    int phase, rest, tile, group, residue[kMaxAxes];
    p.phase_units(phase, rest, unit);
    p.column_groups(tile, group, rest);
    p.phases_w(rest, residue[2], phase);
    p.phases_h(residue[0], residue[1], rest);
    Phase const depth = phases[p.first_phase[0] + residue[0]];
    Phase const height = phases[p.first_phase[1] + residue[1]];
    Phase const width = phases[p.first_phase[2] + residue[2]];
    int const first_column = group * kTiles * kTileColumns;
    float products[kTiles][4] = {};
    // Rows beyond the last read some pixel or none, to no effect.
    Position const position(p, slab, tile * kTileRows + lane % 16);
#pragma unroll 1
    for (int i = 0; i < depth.taps; ++i) {
      int const d = position.at[0] + depth.shift - i * p.axes[0].sub_dilation;
      int const tap_d = depth.first_tap + i * p.axes[0].tap_step;
#pragma unroll 1
      for (int j = 0; j < height.taps; ++j) {
        int const h = position.at[1] + height.shift - j * p.axes[1].sub_dilation;
        int const tap_h = height.first_tap + j * p.axes[1].tap_step;
        bool const line = unsigned(d) < unsigned(p.axes[0].problem.input) &&
                          unsigned(h) < unsigned(p.axes[1].problem.input);
        int const columns = p.axes[2].problem.input;
        int const first = (d * p.axes[1].problem.input + h) * columns - slab.first_input;
#pragma unroll 1
        for (int k = 0; k < width.taps; ++k) {
          int const w = position.at[2] + width.shift - k * p.axes[2].sub_dilation;
          int const tap_w = width.first_tap + k * p.axes[2].tap_step;
          int const pixel = first + w;
          bool const inside =
              line && unsigned(w) < unsigned(columns) && unsigned(pixel) < unsigned(slab.inputs);
          int const tap =
              (tap_d * p.axes[1].problem.kernel + tap_h) * p.axes[2].problem.kernel + tap_w;
          multiply_tap<kMath, kTiles>(products, pixels + (inside ? pixel : p.box) * p.pitch,
                                      filter + (tap * p.tap_rows + first_column) * p.pitch, p.pitch,
                                      steps);
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int const row = tile * kTileRows + half * 8 + lane / 4;
      Position const own(p, slab, row);
      if (row >= p.rows || own.at[0] >= depth.outputs || own.at[1] >= height.outputs ||
          own.at[2] >= width.outputs) {
        continue;
      }
      int pixel = 0;
#pragma unroll
      for (int i = 0; i < kMaxAxes; ++i) {
        AxisProblem const& axis = p.axes[i].problem;
        pixel = pixel * axis.output + own.at[i] * axis.stride + residue[i];
      }
      pixel -= slab.first_output;
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          int const column = first_column + j * kTileColumns + lane % 4 * 2 + e;
          if (column >= p.columns) continue;
          float* const sum =
              sums + (p.channels_last ? pixel * p.columns + column : column * slab.outputs + pixel);
          float const product = products[j][half * 2 + e];
          *sum = is_first ? product : *sum + product;
        }
      }
    }
  }
}

}  // namespace fusedconv::conv::sm90::clusters
