#include <bit>

#include "layernorm/pixel.hpp"
#include "ungrouped/device.hpp"
#include "ungrouped/passes.hpp"

namespace fusedconv::ungrouped {
namespace {

using layernorm::PixelStatistics;
using layernorm::sum_over_lanes;

constexpr int kThreads = 256;
// Blocks at most, which fill an H200: each leaves sums of its pixels.
constexpr int kMostBlocks = 264;
constexpr int kMostHeld = kMostRowChannels / 32;  // channels of a thread
constexpr int kFewSingles = 4;                    // packs of one channel, or kMostHeld

template <int kValue>
using Count = std::integral_constant<int, kValue>;

// Pixels of a thread at a time, as many as leave registers for `held` channels of each.
constexpr int rows_of(int held) { return held <= 8 ? 2 : 1; }

// How threads share pixels: 2^lane_bits neighbours have one, kPacks packs of kVector channels each,
// rows_of() of them at a time.
struct Sharing {
  int vector, packs, lane_bits;

  int held() const { return vector * packs; }
  int64_t block_rows() const { return int64_t(kThreads >> lane_bits) * rows_of(held()); }
  // Blocks side by side along channels, where pixels are not normalised.
  int64_t slabs(int64_t channels) const { return ceil_div(channels, int64_t(held()) << lane_bits); }
};

Sharing sharing_of(GroupNormProblem const& p, Kind kind, int vector) {
  int64_t const packs = ceil_div(p.channels, vector);
  int const bits = std::min(5, int(std::bit_width(uint64_t(packs - 1))));
  if (kind == Kind::kAffine) return {vector, 1, bits};
  int const wanted = int(ceil_div(packs, int64_t(1) << bits));
  if (vector == 1) return {vector, wanted <= kFewSingles ? kFewSingles : kMostHeld, bits};
  return {vector, int(std::bit_ceil(unsigned(wanted))), bits};
}

int widest(GroupNormProblem const& p) {
  int const vector = int(16 / size_of(p.dtype));
  return p.channels % vector == 0 ? vector : 1;
}

int64_t parts_of(GroupNormProblem const& p, Sharing const& sharing) {
  return std::min<int64_t>(kMostBlocks, ceil_div(p.batch * p.pixels, sharing.block_rows()));
}

// Block (part, slab).
template <class T, int kVector, int kPacks, Kind kKind, Known kKnown>
__global__ void __launch_bounds__(kThreads, kVector* kPacks <= 16 ? 2 : 1)
    grad_of_rows(Tensors<T> const tensors, int64_t rows, int lane_bits) {
  constexpr int kHeld = kVector * kPacks;
  constexpr int kRows = rows_of(kHeld);
  extern __shared__ float4 shared[];
  auto* const table = reinterpret_cast<float2*>(shared);  // of the slab's channels
  Affine const& affine = tensors.affine;
  int const lanes = 1 << lane_bits;
  int const lane = int(threadIdx.x) & (lanes - 1);
  int const group = int(threadIdx.x) >> lane_bits;
  int const groups = kThreads >> lane_bits;
  int const width = kHeld << lane_bits;
  int const slab = int(blockIdx.y) * width;
  int const left = affine.channels - slab;  // channels
  for (int i = threadIdx.x; i < width; i += kThreads) table[i] = entry_of(affine, slab + i);
  __syncthreads();
  // Of the k-th pack.
  auto const column_of = [&](int k) { return (lane + (k << lane_bits)) * kVector; };
  auto const entry = [&](int k, int v) { return table[column_of(k) + v]; };
  float const count = float(affine.channels), share = 1.0f / count;

  Sums sums[kPacks][kVector];
  int64_t const step = int64_t(gridDim.x) * (groups * kRows);
#pragma unroll 1
  for (int64_t first = int64_t(blockIdx.x) * (groups * kRows); first < rows; first += step) {
    Pack<T, kVector> inputs[kRows][kPacks], given[kRows][kPacks];
    auto const exists = [&](int r, int k) {
      return first + r * groups + group < rows && column_of(k) < left;
    };
    auto const at = [&](int r, int k) {
      return (first + r * groups + group) * affine.channels + slab + column_of(k);
    };
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        if (!exists(r, k)) continue;
        inputs[r][k] = Pack<T, kVector>::load(tensors.input + at(r, k));
        given[r][k] = Pack<T, kVector>::load(tensors.grad + at(r, k));
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float values[kPacks][kVector], grads[kPacks][kVector];
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        as_floats(inputs[r][k], values[k]);
        as_floats(given[r][k], grads[k]);
        activate<kKnown>(affine, values[k]);
      }
      // Calls body(k, v) for the values that exist.
      auto const for_each = [&](auto const& body) {
#pragma unroll
        for (int k = 0; k < kPacks; ++k) {
          if (!exists(r, k)) continue;
#pragma unroll
          for (int v = 0; v < kVector; ++v) body(k, v);
        }
      };
      [[maybe_unused]] float rstd = 1.0f;
      if constexpr (kKind == Kind::kLayer) {
        float mean[1] = {};
        for_each([&](int k, int v) { mean[0] += values[k][v]; });
        sum_over_lanes(mean, lane_bits);
        mean[0] = layernorm::quotient(mean[0], count, share);
        float deviations[2] = {};  // squares, deviations
        for_each([&](int k, int v) {
          float const deviation = values[k][v] - mean[0];
          deviations[0] = fmaf(deviation, deviation, deviations[0]);
          deviations[1] += deviation;
        });
        sum_over_lanes(deviations, lane_bits);
        auto const statistics =
            PixelStatistics::of(count, mean[0], deviations[1], deviations[0], tensors.eps);
        rstd = statistics.rstd;
        for_each([&](int k, int v) {
          values[k][v] =
              statistics.template normalized<true>(values[k][v], make_float2(1.0f, 0.0f));
        });
      }
      [[maybe_unused]] float means[2] = {};  // of weight g and weight g xhat
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        pass_after<kKnown>(affine, values[k], [&](int v) { return entry(k, v); }, grads[k]);
      }
      for_each([&](int k, int v) {
        sums[k][v].grad += grads[k][v];
        sums[k][v].projection = fmaf(grads[k][v], values[k][v], sums[k][v].projection);
        grads[k][v] *= entry(k, v).x;
        means[0] += grads[k][v];
        means[1] = fmaf(grads[k][v], values[k][v], means[1]);
      });
      if constexpr (kKind == Kind::kLayer) {
        sum_over_lanes(means, lane_bits);
        means[0] *= share;
        means[1] *= share;
        for_each([&](int k, int v) {
          grads[k][v] = rstd * fmaf(-values[k][v], means[1], grads[k][v] - means[0]);
        });
      }
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        if (!exists(r, k)) continue;
        pass_before<kKnown>(affine, inputs[r][k], grads[k]);
        auto const stored = as_stored<T>(grads[k]);
        if (tensors.output != nullptr) stored.store(tensors.output + at(r, k));
#pragma unroll
        for (int v = 0; v < kVector; ++v) sums[k][v].input += grads[k][v];
      }
    }
  }

  // Over the pixels of a warp, then over warps in their order.
#pragma unroll
  for (auto& pack : sums) {
#pragma unroll
    for (Sums& own : pack) {
      for (int offset = lanes; offset < 32; offset *= 2) {
        own.grad += __shfl_xor_sync(~0u, own.grad, offset);
        own.projection += __shfl_xor_sync(~0u, own.projection, offset);
        own.input += __shfl_xor_sync(~0u, own.input, offset);
      }
    }
  }
  auto* const totals = reinterpret_cast<Sums*>(table + width);
  for (int warp = 0; warp < kThreads / 32; ++warp) {
    if (int(threadIdx.x) / 32 == warp && int(threadIdx.x) % 32 < lanes) {
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
#pragma unroll
        for (int v = 0; v < kVector; ++v) {
          Sums& total = totals[column_of(k) + v];
          if (warp == 0) total = {};
          total.grad += sums[k][v].grad;
          total.projection += sums[k][v].projection;
          total.input += sums[k][v].input;
        }
      }
    }
    __syncthreads();
  }
  for (int i = threadIdx.x; i < min(width, left); i += kThreads) {
    leave(tensors.partials, blockIdx.x, affine.channels, slab + i, totals[i]);
  }
}

}  // namespace

int64_t parts_of_rows(GroupNormProblem const& p, Kind kind) {
  return parts_of(p, sharing_of(p, kind, widest(p)));
}

void gradient_of_rows(GradientConfig const& config, GradientTensors const& given,
                      cudaStream_t stream) {
  GroupNormProblem const& p = config.problem;
  bool const aligned = serves(p, given, p.channels, widest(p));
  device::dispatch_type(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    auto const launch = [&](auto vector, auto packs, auto kind, auto known) {
      Sharing const sharing = sharing_of(p, kind.value, vector.value);
      dim3 const grid =
          device::checked_grid("grad_of_rows", config.parts, sharing.slabs(p.channels));
      int const shared = (sharing.held() << sharing.lane_bits) * int(sizeof(float2) + sizeof(Sums));
      grad_of_rows<T, vector.value, packs.value, kind.value, known.value>
          <<<grid, kThreads, shared, stream>>>(tensors_of<T>(p, given), p.batch * p.pixels,
                                               sharing.lane_bits);
    };
    auto const launch_packs = [&](auto vector, auto known, auto... packs) {
      if (config.kind == Kind::kAffine) {
        using Affine = std::integral_constant<Kind, Kind::kAffine>;
        return launch(vector, Count<1>{}, Affine{}, known);
      }
      int const wanted = sharing_of(p, config.kind, vector.value).packs;
      using Layer = std::integral_constant<Kind, Kind::kLayer>;
      ((wanted == packs.value ? launch(vector, packs, Layer{}, known) : void()), ...);
    };
    constexpr int kWhole = 16 / int(sizeof(T));
    if (!aligned || widest(p) != kWhole) {
      using Any = std::integral_constant<Known, Known::kAny>;
      return launch_packs(Count<1>{}, Any{}, Count<kFewSingles>{}, Count<kMostHeld>{});
    }
    dispatch_known(p, [&](auto known) {
      if constexpr (sizeof(T) == 2) {
        launch_packs(Count<kWhole>{}, known, Count<1>{}, Count<2>{}, Count<4>{});
      } else {
        launch_packs(Count<kWhole>{}, known, Count<1>{}, Count<2>{}, Count<4>{}, Count<8>{});
      }
    });
  });
  FUSEDCONV_CUDA("grad_of_rows", cudaGetLastError());
}

}  // namespace fusedconv::ungrouped
