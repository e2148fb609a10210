#include <bit>

#include "cuda/launch.hpp"
#include "ungrouped/device.hpp"
#include "ungrouped/passes.hpp"

namespace fusedconv::ungrouped {
namespace {

using layernorm::sum_over_block;

constexpr int kMultiprocessors = 132;
constexpr int kMostThreads = 512;
constexpr int kMostLanes = 32, kFewestLanes = 8;
constexpr int kFew = 8, kMany = 16;  // channels of a thread: few, as long as blocks have threads
static_assert(kMostThreads / kFewestLanes * kMany >= kMostColumnChannels);

// How threads share pixels: 2^lane_bits neighbours have `vector` pixels each, of `held` channels.
struct Sharing {
  int held, vector, lane_bits, threads;

  int64_t tiles(GroupNormProblem const& p) const {
    return ceil_div(p.pixels, int64_t(vector) << lane_bits);
  }
};

Sharing sharing_of(GroupNormProblem const& p, int vector) {
  int const held = p.channels <= kMostThreads / kFewestLanes * kFew ? kFew : kMany;
  int const parts = int(ceil_div(p.channels, held));
  int bits = std::bit_width(unsigned(kMostLanes)) - 1;
  while (1 << bits > kFewestLanes &&
         (parts << bits > kMostThreads || (int64_t(vector) << (bits - 1)) >= p.pixels)) {
    --bits;
  }
  return {held, vector, bits, int(round_up(int64_t(parts) << bits, 32))};
}

int widest(GroupNormProblem const& p) { return p.pixels % 2 == 0 ? 2 : 1; }

// Blocks go over tiles of pixels in turn.
template <class T, class G, int kHeld, int kVector, Known kKnown>
__global__ void __launch_bounds__(kMostThreads, 1)
    grad_of_columns(Tensors<T, G> const tensors, int64_t pixels, int64_t tiles, int64_t all_tiles,
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
  struct Loaded {
    Pack<T, kVector> inputs[kHeld];
    Pack<G, kVector> grads[kHeld];
  };
  // Where a tile's values of the thread begin, and how many of its channels exist.
  struct Place {
    int64_t base;
    int held;
    bool whole;  // the block's pixels and channels all exist
  };
  auto const place_of = [&](int64_t tile) {
    int64_t const sample = tile / tiles, first = ((tile % tiles) << lane_bits) * kVector;
    int64_t const pixel = first + lane * kVector;
    int const held = pixel < pixels ? min(kHeld, affine.channels - own_first) : 0;
    return Place{(sample * affine.channels + own_first) * pixels + pixel, held,
                 first + (kVector << lane_bits) <= pixels && parts * kHeld == affine.channels};
  };
  // Nothing is made of what is loaded until all of it is on the way.
  auto const load = [&](int64_t tile, Loaded& loaded) {
    Place const place = place_of(tile);
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (k >= place.held) continue;
      loaded.inputs[k] = Pack<T, kVector>::load(tensors.input + place.base + k * pixels);
      loaded.grads[k] = Pack<G, kVector>::load(tensors.grad + place.base + k * pixels);
    }
  };
  // The input stays what was loaded, and is widened and activated again wherever it is read.
  auto const finish = [&](auto whole, Place const& place, Loaded const& loaded) {
    constexpr bool kLow = kMeanHasLow<T, kKnown>;
    auto const exists = [&](int k) { return whole || k < place.held; };
    auto const values_of = [&](int k, float (&values)[kVector]) {
      as_floats(loaded.inputs[k], values);
      activate<kKnown>(affine, values);
    };
    float mean[kVector] = {};
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (!exists(k)) continue;
      float values[kVector];
      values_of(k, values);
#pragma unroll
      for (int v = 0; v < kVector; ++v) mean[v] += values[v];
    }
    sum_over_block(mean, lane_bits, means_shared);
#pragma unroll
    for (float& value : mean) value = layernorm::quotient(value, count, share);
    float deviations[(kLow ? 2 : 1) * kVector] = {};  // squares, deviations
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (!exists(k)) continue;
      float values[kVector];
      values_of(k, values);
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        float const deviation = values[v] - mean[v];
        deviations[v] = fmaf(deviation, deviation, deviations[v]);
        if constexpr (kLow) deviations[kVector + v] += deviation;
      }
    }
    sum_over_block(deviations, lane_bits, means_shared + sums_size);
    float rstd[kVector], shift[kVector];
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      auto const statistics = statistics_of<kLow>(share, mean[v], deviations[v],
                                                  deviations[kLow ? kVector + v : v], tensors.eps);
      rstd[v] = statistics.rstd;
      shift[v] = statistics.shift;
    }
    // xhat of a channel.
    auto const normalized_of = [&](int k, float (&values)[kVector]) {
      values_of(k, values);
#pragma unroll
      for (int v = 0; v < kVector; ++v) values[v] = fmaf(values[v] - mean[v], rstd[v], shift[v]);
    };
    float grads[kHeld][kVector];
    float means[2 * kVector] = {};  // of weight g and weight g xhat
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (!exists(k)) continue;
      float values[kVector];
      normalized_of(k, values);
      as_floats(loaded.grads[k], grads[k]);
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
      if (!exists(k)) continue;
      float values[kVector];
      normalized_of(k, values);
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        grads[k][v] = rstd[v] * fmaf(-values[v], means[kVector + v], grads[k][v] - means[v]);
      }
      pass_before<kKnown>(affine, loaded.inputs[k], grads[k]);
      auto const stored = as_stored<T>(grads[k]);
      if (tensors.output != nullptr) stored.store(tensors.output + place.base + k * pixels);
#pragma unroll
      for (float const value : grads[k]) sums[k].input += value;
    }
  };
  // Of few channels what comes next is loaded while this is computed, and no branch keeps channels
  // apart: with few warps nothing else would hide how long memory and chains of sums take.
  constexpr bool kRoomy = kHeld == kFew && kKnown != Known::kAny;
  if constexpr (kRoomy) {
    Loaded next;
    load(blockIdx.x, next);
#pragma unroll 1
    for (int64_t tile = blockIdx.x; tile < all_tiles; tile += gridDim.x) {
      Loaded const loaded = next;
      if (tile + gridDim.x < all_tiles) load(tile + gridDim.x, next);
      Place const place = place_of(tile);
      if (place.whole) {
        finish(std::true_type{}, place, loaded);
      } else {
        finish(std::false_type{}, place, loaded);
      }
    }
  } else {
#pragma unroll 1
    for (int64_t tile = blockIdx.x; tile < all_tiles; tile += gridDim.x) {
      Loaded loaded;
      load(tile, loaded);
      finish(std::false_type{}, place_of(tile), loaded);
    }
  }

#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    for (int offset = 1; offset < lanes; offset *= 2) {
      for_each_sum<Kind::kLayer>(
          [&](auto sum) { sums[k].*sum += __shfl_xor_sync(~0u, sums[k].*sum, offset); });
    }
    if (lane == 0 && own_first + k < affine.channels) {
      leave<Kind::kLayer>(tensors.partials, blockIdx.x, affine.channels, own_first + k, sums[k]);
    }
  }
}

}  // namespace

// As many blocks as an H200 has at once: each leaves sums of its pixels.
int64_t parts_of_columns(GroupNormProblem const& p) {
  Sharing const sharing = sharing_of(p, widest(p));
  return std::min<int64_t>(kMultiprocessors * (kMostThreads / sharing.threads),
                           p.batch * sharing.tiles(p));
}

void gradient_of_columns(GradientConfig const& config, GradientTensors const& given,
                         cudaStream_t stream) {
  GroupNormProblem const& p = config.problem;
  dispatch_types(p, [&](auto zero, auto grad) {
    using T = decltype(zero);
    using G = decltype(grad);
    auto const launch = [&](auto vector, auto known) {
      Sharing const sharing = sharing_of(p, vector.value);
      auto const kernel = sharing.held == kFew
                              ? grad_of_columns<T, G, kFew, vector.value, known.value>
                              : grad_of_columns<T, G, kMany, vector.value, known.value>;
      int const parts = sharing.threads >> sharing.lane_bits;
      int const sums = (sharing.threads / 32 << sharing.lane_bits) * vector.value;
      int const shared =
          parts * sharing.held * int(sizeof(float2)) + (1 + 2 + 2) * sums * int(sizeof(float));
      int64_t const tiles = sharing.tiles(p);
      dim3 const grid = device::checked_grid("grad_of_columns", config.parts);
      device::launch(kernel, grid, sharing.threads, shared, stream, tensors_of<T, G>(p, given),
                     p.pixels, tiles, p.batch * tiles, sharing.lane_bits);
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
