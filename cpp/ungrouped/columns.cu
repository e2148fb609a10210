#include <bit>

#include "layernorm/pixel.hpp"
#include "ungrouped/device.hpp"
#include "ungrouped/passes.hpp"

namespace fusedconv::ungrouped {
namespace {

using layernorm::PixelStatistics;
using layernorm::sum_over_block;

constexpr int kHeld = 16;  // channels of a thread
constexpr int kMostThreads = 512;
constexpr int kMostLanes = 32, kFewestLanes = 8;
// Threads of all blocks at most, which fill an H200: each block leaves sums of its pixels.
constexpr int kAllThreads = 132 * 512;
static_assert(kMostThreads / kFewestLanes * kHeld >= kMostColumnChannels);

// How threads share pixels: 2^lane_bits neighbours have kVector pixels each, of kHeld channels.
struct Sharing {
  int vector, lane_bits, threads;

  int64_t tiles(GroupNormProblem const& p) const {
    return ceil_div(p.pixels, int64_t(vector) << lane_bits);
  }
};

Sharing sharing_of(GroupNormProblem const& p, int vector) {
  int const parts = int(ceil_div(p.channels, kHeld));
  int bits = std::bit_width(unsigned(kMostLanes)) - 1;
  while (1 << bits > kFewestLanes &&
         (parts << bits > kMostThreads || (int64_t(vector) << (bits - 1)) >= p.pixels)) {
    --bits;
  }
  return {vector, bits, int(round_up(int64_t(parts) << bits, 32))};
}

int widest(GroupNormProblem const& p) { return p.pixels % 2 == 0 ? 2 : 1; }

// Blocks go over tiles of pixels in turn.
template <class T, int kVector, Known kKnown>
__global__ void __launch_bounds__(kMostThreads, 1)
    grad_of_columns(Tensors<T> const tensors, int64_t pixels, int64_t tiles, int64_t all_tiles,
                    int lane_bits) {
  extern __shared__ float4 shared[];
  Affine const& affine = tensors.affine;
  int const lanes = 1 << lane_bits;
  int const lane = int(threadIdx.x) & (lanes - 1);
  int const own_first = (int(threadIdx.x) >> lane_bits) * kHeld;
  auto* const table = reinterpret_cast<float2*>(shared);
  int const parts = int(blockDim.x) >> lane_bits;
  float* const means_shared = reinterpret_cast<float*>(table + parts * kHeld);
  int const sums_size = (int(blockDim.x) / 32 * kVector) << lane_bits;
  for (int i = threadIdx.x; i < parts * kHeld; i += int(blockDim.x)) table[i] = entry_of(affine, i);
  __syncthreads();
  float const count = float(affine.channels), share = 1.0f / count;

  Sums sums[kHeld];
#pragma unroll 1
  for (int64_t tile = blockIdx.x; tile < all_tiles; tile += gridDim.x) {
    int64_t const sample = tile / tiles;
    int64_t const pixel = ((tile % tiles) << lane_bits | lane) * kVector;
    int64_t const base = (sample * affine.channels + own_first) * pixels + pixel;
    int const held = pixel < pixels ? min(kHeld, affine.channels - own_first) : 0;
    // The input stays what was loaded, and is widened and activated again wherever it is read.
    Pack<T, kVector> inputs[kHeld];
    float grads[kHeld][kVector];
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (k >= held) continue;
      inputs[k] = Pack<T, kVector>::load(tensors.input + base + k * pixels);
      as_floats(Pack<T, kVector>::load(tensors.grad + base + k * pixels), grads[k]);
    }
    auto const values_of = [&](int k, float (&values)[kVector]) {
      as_floats(inputs[k], values);
      activate<kKnown>(affine, values);
    };
    float mean[kVector] = {};
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (k >= held) continue;
      float values[kVector];
      values_of(k, values);
#pragma unroll
      for (int v = 0; v < kVector; ++v) mean[v] += values[v];
    }
    sum_over_block(mean, lane_bits, means_shared);
#pragma unroll
    for (float& value : mean) value = layernorm::quotient(value, count, share);
    float deviations[2 * kVector] = {};  // squares, deviations
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (k >= held) continue;
      float values[kVector];
      values_of(k, values);
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        float const deviation = values[v] - mean[v];
        deviations[v] = fmaf(deviation, deviation, deviations[v]);
        deviations[kVector + v] += deviation;
      }
    }
    sum_over_block(deviations, lane_bits, means_shared + sums_size);
    PixelStatistics statistics[kVector];
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      statistics[v] =
          PixelStatistics::of(count, mean[v], deviations[kVector + v], deviations[v], tensors.eps);
    }
    // xhat of a channel.
    auto const normalized_of = [&](int k, float (&values)[kVector]) {
      values_of(k, values);
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        values[v] = statistics[v].template normalized<true>(values[v], make_float2(1.0f, 0.0f));
      }
    };
    float means[2 * kVector] = {};  // of weight g and weight g xhat
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (k >= held) continue;
      float values[kVector];
      normalized_of(k, values);
      float2 const entry = table[own_first + k];
      pass_after<kKnown>(affine, values, [&](int) { return entry; }, grads[k]);
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        sums[k].grad += grads[k][v];
        sums[k].projection = fmaf(grads[k][v], values[v], sums[k].projection);
        grads[k][v] *= entry.x;
        means[v] += grads[k][v];
        means[kVector + v] = fmaf(grads[k][v], values[v], means[kVector + v]);
      }
    }
    sum_over_block(means, lane_bits, means_shared + 3 * sums_size);
#pragma unroll
    for (float& value : means) value *= share;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (k >= held) continue;
      float values[kVector];
      normalized_of(k, values);
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        grads[k][v] =
            statistics[v].rstd * fmaf(-values[v], means[kVector + v], grads[k][v] - means[v]);
      }
      pass_before<kKnown>(affine, inputs[k], grads[k]);
      auto const stored = as_stored<T>(grads[k]);
      if (tensors.output != nullptr) stored.store(tensors.output + base + k * pixels);
#pragma unroll
      for (float const value : grads[k]) sums[k].input += value;
    }
  }

#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    for (int offset = 1; offset < lanes; offset *= 2) {
      sums[k].grad += __shfl_xor_sync(~0u, sums[k].grad, offset);
      sums[k].projection += __shfl_xor_sync(~0u, sums[k].projection, offset);
      sums[k].input += __shfl_xor_sync(~0u, sums[k].input, offset);
    }
    if (lane == 0 && own_first + k < affine.channels) {
      leave(tensors.partials, blockIdx.x, affine.channels, own_first + k, sums[k]);
    }
  }
}

}  // namespace

int64_t parts_of_columns(GroupNormProblem const& p) {
  Sharing const sharing = sharing_of(p, widest(p));
  return std::min<int64_t>(kAllThreads / sharing.threads, p.batch * sharing.tiles(p));
}

void gradient_of_columns(GradientConfig const& config, GradientTensors const& given,
                         cudaStream_t stream) {
  GroupNormProblem const& p = config.problem;
  device::dispatch_type(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    auto const launch = [&](auto vector, auto known) {
      Sharing const sharing = sharing_of(p, vector.value);
      int const parts = sharing.threads >> sharing.lane_bits;
      int const sums = (sharing.threads / 32 << sharing.lane_bits) * vector.value;
      int const shared =
          parts * kHeld * int(sizeof(float2)) + (1 + 2 + 2) * sums * int(sizeof(float));
      int64_t const tiles = sharing.tiles(p);
      dim3 const grid = device::checked_grid("grad_of_columns", config.parts);
      grad_of_columns<T, vector.value, known.value><<<grid, sharing.threads, shared, stream>>>(
          tensors_of<T>(p, given), p.pixels, tiles, p.batch * tiles, sharing.lane_bits);
    };
    if (!serves(p, given, p.pixels, 2)) {
      using Any = std::integral_constant<Known, Known::kAny>;
      return launch(std::integral_constant<int, 1>{}, Any{});
    }
    dispatch_known(p, [&](auto known) { launch(std::integral_constant<int, 2>{}, known); });
  });
  FUSEDCONV_CUDA("grad_of_columns", cudaGetLastError());
}

}  // namespace fusedconv::ungrouped
