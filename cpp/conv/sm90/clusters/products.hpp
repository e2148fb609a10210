// What a warp multiplies: tiles of neighbouring output positions of one phase by output channels,
// over the phase's taps and the chunk's input channels.
#pragma once

#include <cstdint>

#include "conv/mma_sync.hpp"
#include "conv/sm90/clusters/params.hpp"
#include "cuda/async.hpp"

namespace fusedconv::conv::sm90::clusters {

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

// As conv::load_matrices(), from an address of shared memory: pointers are turned to those anew
// wherever they are used.
__device__ __forceinline__ void load_matrices(uint32_t (&words)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(row));
}
__device__ __forceinline__ void load_matrices(uint32_t (&words)[2], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(words[0]), "=r"(words[1])
               : "r"(row));
}

// Adds the products of kSteps steps, whose operands are all on their way before the first product.
template <Math kMath, int kTiles, int kSteps>
__device__ __forceinline__ void multiply_steps(float (&sums)[kTiles][4], uint32_t pixels,
                                               uint32_t filter, int pitch) {
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
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      if constexpr (kSplits) split(b[k][j], small_b);
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

// Adds the products of one tap, of so many bytes of channels; `pairs` of them are whole pairs of
// steps.
template <Math kMath, int kTiles>
__device__ __forceinline__ void multiply_tap(float (&sums)[kTiles][4], uint32_t pixels,
                                             uint32_t filter, int pitch, int bytes, int pairs) {
  if constexpr (kMath == Math::kTf32x3) {
    // What the tensor cores drop of a longer sum would exceed the error of eager's.
#pragma unroll 1
    for (int at = 0; at < bytes; at += kStepBytes) {
      float part[kTiles][4] = {};
      multiply_steps<kMath, kTiles, 1>(part, pixels + at, filter + at, pitch);
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[j][e] += part[j][e];
      }
    }
  } else {
#pragma unroll 1
    for (int at = 0; at < pairs; at += 2 * kStepBytes) {
      multiply_steps<kMath, kTiles, 2>(sums, pixels + at, filter + at, pitch);
    }
    if (pairs < bytes) {
      multiply_steps<kMath, kTiles, 1>(sums, pixels + pairs, filter + pairs, pitch);
    }
  }
}

// Adds a chunk's products to `sums`, or makes them those if it is the first: by output channel and
// pixel of the slab in the tensors' layout. `steps` of the chunk have channels.
template <Math kMath, int kTiles>
__device__ __forceinline__ void multiply(Params const& p, Slab const& slab,
                                         unsigned char const* shared, unsigned char const* rows,
                                         float* sums, int steps, bool is_first) {
  int const lane = threadIdx.x % 32;
  int const bytes = kept(steps * kStepBytes), pairs = kept(steps / 2 * 2 * kStepBytes);
  int const pitch = kept(p.pitch);
  uint32_t const pixels = device::shared_address(rows) + lane / 16 * 16;
  uint32_t const outside = kept(pixels + p.box * p.pitch);  // zeros
  uint32_t const filter = device::shared_address(shared) + lane / 8 % 2 * 16 +
                          (kTiles == 1 ? lane % 8 : lane / 16 * 8 + lane % 8) * p.pitch;
#pragma unroll 1
  for (int unit = uniform(int(threadIdx.x) / 32); unit < p.units; unit += kWarps) {
    int phase, rest, tile, group, residue[kMaxAxes];
    p.phase_units(phase, rest, unit);
    p.column_groups(tile, group, rest);
    p.phases_w(rest, residue[2], phase);
    p.phases_h(residue[0], residue[1], rest);
    int const first_column = group * kTiles * kTileColumns;
    float products[kTiles][4] = {};
    // Rows beyond the last read some pixel or none, to no effect.
    int const row = tile * kTileRows + lane % 16;
    Position const position(p, slab, row);
    // Input lines and pixels that the first taps meet, by axis, and where those and the taps are.
    int taps[kMaxAxes], at[kMaxAxes];
    uint32_t pixel = pixels, tap = filter + first_column * p.pitch;
    bool stored = row < p.rows;
    int output = 0;
#pragma unroll
    for (int i = 0; i < kMaxAxes; ++i) {
      Phase const own = p.phases[p.first_phase[i] + residue[i]];
      taps[i] = own.taps;
      at[i] = position.at[i] + own.shift - (i == p.outer ? slab.first_line : 0);
      pixel += at[i] * p.steps[i].pixel;
      tap += own.first_tap * p.steps[i].tap;
      stored = stored && position.at[i] < own.outputs;
      output = output * p.steps[i].output + position.at[i] * p.steps[i].stride + residue[i];
    }
    output = stored ? output - slab.first_output : -1;
    auto const lines = [&](int i) { return i == p.outer ? slab.lines : p.steps[i].input; };
    int const depth = lines(0), height = kept(lines(1)), width = kept(lines(2));
    int const dilation = kept(p.steps[2].dilation);
    int const next_pixel = kept(p.steps[2].next_pixel), next_tap = kept(p.steps[2].next_tap);
#pragma unroll 1
    for (int i = 0; i < taps[0]; ++i) {
      bool const plane = unsigned(at[0]) < unsigned(depth);
      int h = at[1];
      uint32_t line_pixel = pixel, line_tap = tap;
#pragma unroll 1
      for (int j = 0; j < taps[1]; ++j) {
        bool const line = plane && unsigned(h) < unsigned(height);
        int w = at[2];
        uint32_t own_pixel = line_pixel, own_tap = line_tap;
#pragma unroll 1
        for (int k = 0; k < taps[2]; ++k) {
          bool const inside = line && unsigned(w) < unsigned(width);
          multiply_tap<kMath, kTiles>(products, inside ? own_pixel : outside, own_tap, pitch, bytes,
                                      pairs);
          w -= dilation;
          own_pixel -= next_pixel;
          own_tap += next_tap;
        }
        h -= p.steps[1].dilation;
        line_pixel -= p.steps[1].next_pixel;
        line_tap += p.steps[1].next_tap;
      }
      at[0] -= p.steps[0].dilation;
      pixel -= p.steps[0].next_pixel;
      tap += p.steps[0].next_tap;
    }
    int const pixel_stride = p.channels_last ? p.columns : 1;
    int const column_stride = p.channels_last ? 1 : slab.outputs;
    int const own_column = first_column + lane % 4 * 2;
    int const columns = p.columns - own_column;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int const own_output = __shfl_sync(~0u, output, half * 8 + lane / 4);
      if (own_output < 0) continue;
      float* sum = sums + own_output * pixel_stride + own_column * column_stride;
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (j * kTileColumns + e < columns) {
            float const product = products[j][half * 2 + e];
            float* const own = sum + e * column_stride;
            *own = is_first ? product : *own + product;
          }
        }
        sum += kTileColumns * column_stride;
      }
    }
  }
}

}  // namespace fusedconv::conv::sm90::clusters
