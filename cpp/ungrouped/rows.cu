#include <bit>

#include "cuda/launch.hpp"
#include "ungrouped/device.hpp"
#include "ungrouped/passes.hpp"

namespace fusedconv::ungrouped {
namespace {

using layernorm::sum_over_lanes;

constexpr int kThreads = 256;
constexpr int kMultiprocessors = 132;
constexpr int kMostHeld = kMostRowChannels / 32;  // channels of a thread
constexpr int kFewSingles = 4;                    // packs of one channel, or kMostHeld

template <int kValue>
using Count = std::integral_constant<int, kValue>;

// Pixels of a thread at a time, as many as leave registers for `held` channels of each.
constexpr int rows_of(int held) { return held <= 8 ? 2 : 1; }

// Blocks of a multiprocessor, as far as registers go.
constexpr int resident_of(Kind kind, int held) {
  if (kind == Kind::kIdentity) return 4;
  return held <= 16 ? 2 : 1;
}

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
  if (kind != Kind::kLayer) return {vector, 1, bits};
  int const wanted = int(ceil_div(packs, int64_t(1) << bits));
  if (vector == 1) return {vector, wanted <= kFewSingles ? kFewSingles : kMostHeld, bits};
  return {vector, int(std::bit_ceil(unsigned(wanted))), bits};
}

int widest(GroupNormProblem const& p) {
  int const vector = int(16 / size_of(p.dtype));
  return p.channels % vector == 0 ? vector : 1;
}

// Whether registers hold what comes next, loaded while a thread computes, and values of several
// rows at once: few warps would not hide how long memory and chains of sums take. Calls leave too
// few of them.
template <class T, class G>
constexpr bool is_roomy(Kind kind, Known known, int held) {
  int const bytes = held * int(sizeof(T) + sizeof(G)) / 2;  // of a pixel's channels in a tensor
  return known != Known::kAny && bytes <= (resident_of(kind, held) == 1 ? 64 : 32);
}

// As many blocks as fill an H200 at most: each leaves sums of its pixels.
int64_t parts_of(GroupNormProblem const& p, Kind kind, Sharing const& sharing) {
  int64_t const blocks = kMultiprocessors * resident_of(kind, sharing.held());
  return std::min(std::max<int64_t>(1, blocks / sharing.slabs(p.channels)),
                  ceil_div(p.batch * p.pixels, sharing.block_rows()));
}

// Block (part, slab).
template <class T, class G, int kVector, int kPacks, Kind kKind, Known kKnown>
__global__ void __launch_bounds__(kThreads, resident_of(kKind, kVector* kPacks))
    grad_of_rows(Tensors<T, G> const tensors, int64_t rows, int lane_bits) {
  constexpr int kHeld = kVector * kPacks;
  constexpr int kRows = rows_of(kHeld);
  constexpr bool kRoomy = is_roomy<T, G>(kKind, kKnown, kHeld);
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
  if constexpr (kKind != Kind::kIdentity) {
    for (int i = threadIdx.x; i < width; i += kThreads) table[i] = entry_of(affine, slab + i);
    __syncthreads();
  }
  // Of the k-th pack.
  auto const column_of = [&](int k) { return (lane + (k << lane_bits)) * kVector; };
  auto const entry = [&](int k, int v) { return table[column_of(k) + v]; };
  float const count = float(affine.channels), share = 1.0f / count;

  Sums sums[kPacks][kVector];
  struct Loaded {
    Pack<T, kVector> inputs[kRows][kPacks];
    Pack<G, kVector> grads[kRows][kPacks];
  };
  auto const row_of = [&](int64_t first, int r) { return first + r * groups + group; };
  auto const at = [&](int64_t row, int k) { return row * affine.channels + slab + column_of(k); };
  // Nothing beyond the last row.
  auto const load = [&](int64_t first, Loaded& loaded) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        int64_t const row = row_of(first, r);
        if (row >= rows || column_of(k) >= left) continue;
        if constexpr (kReads<kKind, kKnown>) {
          loaded.inputs[r][k] = Pack<T, kVector>::load(tensors.input + at(row, k));
        }
        loaded.grads[r][k] = Pack<G, kVector>::load(tensors.grad + at(row, k));
      }
    }
  };
  // `whole`: the block's rows and channels exist, so that no branch keeps rows apart.
  auto const finish = [&](auto whole, int64_t first, Loaded const& loaded) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      int64_t const row = row_of(first, r);
      auto const exists = [&](int k) { return whole || (row < rows && column_of(k) < left); };
      float values[kPacks][kVector], grads[kPacks][kVector];
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        as_floats(loaded.grads[r][k], grads[k]);
        if constexpr (kReads<kKind, kKnown>) {
          as_floats(loaded.inputs[r][k], values[k]);
          activate<kKnown>(affine, values[k]);
        }
      }
      // Calls body(k, v) for the values that exist.
      auto const for_each = [&](auto const& body) {
#pragma unroll
        for (int k = 0; k < kPacks; ++k) {
          if (!exists(k)) continue;
#pragma unroll
          for (int v = 0; v < kVector; ++v) body(k, v);
        }
      };
      [[maybe_unused]] float rstd = 1.0f;
      if constexpr (kKind == Kind::kLayer) {
        constexpr bool kLow = kMeanHasLow<T, kKnown>;
        float mean[1] = {};
        for_each([&](int k, int v) { mean[0] += values[k][v]; });
        sum_over_lanes(mean, lane_bits);
        mean[0] = layernorm::quotient(mean[0], count, share);
        float deviations[kLow ? 2 : 1] = {};  // squares, deviations
        for_each([&](int k, int v) {
          values[k][v] -= mean[0];
          deviations[0] = fmaf(values[k][v], values[k][v], deviations[0]);
          if constexpr (kLow) deviations[1] += values[k][v];
        });
        sum_over_lanes(deviations, lane_bits);
        auto const statistics = statistics_of<kLow>(share, mean[0], deviations[0],
                                                    deviations[kLow ? 1 : 0], tensors.eps);
        rstd = statistics.rstd;
        for_each([&](int k, int v) { values[k][v] = fmaf(values[k][v], rstd, statistics.shift); });
      }
      if constexpr (kKind == Kind::kIdentity) {
#pragma unroll
        for (int k = 0; k < kPacks; ++k) pass_activation<kKnown>(affine, values[k], grads[k]);
      } else {
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
      }
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        if (!exists(k)) continue;
        if constexpr (kReads<kKind, kKnown>) {
          if constexpr (kKind != Kind::kIdentity) {
            pass_before<kKnown>(affine, loaded.inputs[r][k], grads[k]);
          }
          auto const stored = as_stored<T>(grads[k]);
          if (tensors.output != nullptr) stored.store(tensors.output + at(row, k));
        }
#pragma unroll
        for (int v = 0; v < kVector; ++v) sums[k][v].input += grads[k][v];
      }
    }
  };
  int64_t const block_rows = groups * kRows, step = int64_t(gridDim.x) * block_rows;
  int64_t first = int64_t(blockIdx.x) * block_rows;
  if constexpr (kRoomy) {
    Loaded next;
    load(first, next);
#pragma unroll 1
    for (; first < rows; first += step) {
      Loaded const loaded = next;
      load(first + step, next);
      if (left >= width && first + block_rows <= rows) {
        finish(std::true_type{}, first, loaded);
      } else {
        finish(std::false_type{}, first, loaded);
      }
    }
  } else {
#pragma unroll 1
    for (; first < rows; first += step) {
      Loaded loaded;
      load(first, loaded);
      finish(std::false_type{}, first, loaded);
    }
  }

  // Over the pixels of a warp, then over warps in their order.
#pragma unroll
  for (auto& pack : sums) {
#pragma unroll
    for (Sums& own : pack) {
      for (int offset = lanes; offset < 32; offset *= 2) {
        for_each_sum<kKind>([&](auto sum) { own.*sum += __shfl_xor_sync(~0u, own.*sum, offset); });
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
          for_each_sum<kKind>([&](auto sum) { total.*sum += sums[k][v].*sum; });
        }
      }
    }
    __syncthreads();
  }
  for (int i = threadIdx.x; i < min(width, left); i += kThreads) {
    leave<kKind>(tensors.partials, blockIdx.x, affine.channels, slab + i, totals[i]);
  }
}

}  // namespace

int64_t parts_of_rows(GroupNormProblem const& p, Kind kind) {
  return parts_of(p, kind, sharing_of(p, kind, widest(p)));
}

void gradient_of_rows(GradientConfig const& config, GradientTensors const& given,
                      cudaStream_t stream) {
  GroupNormProblem const& p = config.problem;
  bool const aligned = serves(p, given, p.channels, widest(p));
  dispatch_types(p, [&](auto zero, auto grad) {
    using T = decltype(zero);
    using G = decltype(grad);
    constexpr bool kWide = !std::is_same_v<T, G>;
    auto const launch = [&](auto vector, auto packs, auto kind, auto known) {
      Sharing const sharing = sharing_of(p, kind.value, vector.value);
      dim3 const grid =
          device::checked_grid("grad_of_rows", config.parts, sharing.slabs(p.channels));
      int const shared = (sharing.held() << sharing.lane_bits) * int(sizeof(float2) + sizeof(Sums));
      device::launch(grad_of_rows<T, G, vector.value, packs.value, kind.value, known.value>, grid,
                     kThreads, shared, stream, tensors_of<T, G>(p, given), p.batch * p.pixels,
                     sharing.lane_bits);
    };
    auto const launch_packs = [&](auto vector, auto known, auto... packs) {
      if constexpr (!kWide) {
        if (config.kind == Kind::kAffine) {
          using Affine = std::integral_constant<Kind, Kind::kAffine>;
          return launch(vector, Count<1>{}, Affine{}, known);
        }
        if (config.kind == Kind::kIdentity) {
          using Identity = std::integral_constant<Kind, Kind::kIdentity>;
          return launch(vector, Count<1>{}, Identity{}, known);
        }
      }
      int const wanted = sharing_of(p, config.kind, vector.value).packs;
      using Layer = std::integral_constant<Kind, Kind::kLayer>;
      ((wanted == packs.value ? launch(vector, packs, Layer{}, known) : void()), ...);
    };
    constexpr int kWhole = 16 / int(sizeof(T));
    if (!aligned || widest(p) != kWhole) {
      using Any = std::integral_constant<Known, Known::kAny>;
      if constexpr (!kWide) {
        using None = std::integral_constant<Known, Known::kNone>;
        using Identity = std::integral_constant<Kind, Kind::kIdentity>;
        if (!config.reads_input()) return launch(Count<1>{}, Count<1>{}, Identity{}, None{});
      }
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
