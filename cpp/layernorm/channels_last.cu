#include "cuda/launch.hpp"
#include "layernorm/passes.hpp"
#include "layernorm/pixel.hpp"

namespace fusedconv::layernorm {
namespace {

constexpr int kRowThreads = 256;
constexpr int kHeld = 32;      // values of a thread, in registers between the passes over them
constexpr int kShortRows = 4;  // of a thread that has one pack of each

template <int kVector, int kRows>
constexpr int kPacksOf = kRows == kShortRows ? 1 : kHeld / kVector / kRows;

// 2^lane_bits neighbouring threads share kRows pixels, of each of which a thread has kPacks times
// kVector channels.
template <class T, class U, int kVector, int kRows, int kKnown>
__global__ void __launch_bounds__(kRowThreads, kKnown == groupnorm::kAnyActivation ? 3 : 4)
    normalize_channels_last(Tensors<T, U> const tensors, int64_t rows, int lane_bits) {
  constexpr int kPacks = kPacksOf<kVector, kRows>;
  constexpr bool kLow = kKeepsLow<T>;
  constexpr int kPair = kVector < 2 ? 1 : 2;
  extern __shared__ float4 shared[];
  Affine const& affine = tensors.affine;
  int const lane = int(threadIdx.x) & ((1 << lane_bits) - 1);
  int const group = int(threadIdx.x) >> lane_bits;
  int const groups = kRowThreads >> lane_bits;
  int const packs = affine.channels / kVector;
  // Weights and biases as threads read them, neighbours side by side.
  float2* const table = reinterpret_cast<float2*>(shared);
  auto const place_of = [&](int k, int pair, int lane) {
    return ((k * (kVector / kPair) + pair) << lane_bits | lane) * kPair;
  };

  int64_t const row = int64_t(device::block_from_last()) * (groups * kRows) + group;
  int64_t const base = row * affine.channels + lane * kVector;
  int64_t const row_step = int64_t(groups) * affine.channels;
  int const pack_step = kVector << lane_bits;
  int const rows_left = int(max(min(rows - row, int64_t(groups * kRows)), int64_t(0)));
  auto const exists = [&](int r, int k) {
    return r * groups < rows_left && lane + (k << lane_bits) < packs;
  };
  float values[kRows][kPacks][kVector] = {};
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (exists(r, k)) {
        load_values<T, kVector>(tensors.input + base + r * row_step + k * pack_step, values[r][k]);
      }
    }
  }
  int const held = min(affine.channels, kPacks * pack_step);
  for (int channel = threadIdx.x; channel < held; channel += kRowThreads) {
    int const pack = channel / kVector;
    int const within = channel % kVector;
    table[place_of(pack >> lane_bits, within / kPair, pack & ((1 << lane_bits) - 1)) +
          within % kPair] = weight_and_bias_of(affine, channel);
  }
  __syncthreads();
#pragma unroll
  for (auto& of_row : values) {
#pragma unroll
    for (auto& pack : of_row) {
      groupnorm::activate<kKnown>(affine.activation_before, affine.quick, pack);
    }
  }
  // The packs beyond those held, of a row: kRows is 1 where there are any.
  auto const each_other = [&](auto&& body) {
    if constexpr (kRows == 1) {
#pragma unroll 1
      for (int pack = lane + (kPacks << lane_bits); row < rows && pack < packs;
           pack += 1 << lane_bits) {
        int const offset = (pack - lane) * kVector;
        float others[kVector];
        load_values<T, kVector>(tensors.input + base + offset, others);
        groupnorm::activate<kKnown>(affine.activation_before, affine.quick, others);
        body(others, offset);
      }
    }
  };

  float const count = float(affine.channels), share = 1.0f / count;
  float mean[kRows] = {};
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    auto const add = [&](float const(&some)[kVector]) {
#pragma unroll
      for (float const value : some) mean[r] += value;
    };
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (exists(r, k)) add(values[r][k]);
    }
    each_other([&](float const(&others)[kVector], int) { add(others); });
  }
  sum_over_lanes(mean, lane_bits);
#pragma unroll
  for (float& value : mean) value = quotient(value, count, share);

  float deviations[(kLow ? 2 : 1) * kRows] = {};  // squares, deviations
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    auto const add = [&](float const(&some)[kVector]) {
#pragma unroll
      for (float const value : some) {
        float const deviation = value - mean[r];
        deviations[r] = fmaf(deviation, deviation, deviations[r]);
        if constexpr (kLow) deviations[kRows + r] += deviation;
      }
    };
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (exists(r, k)) add(values[r][k]);
    }
    each_other([&](float const(&others)[kVector], int) { add(others); });
  }
  sum_over_lanes(deviations, lane_bits);
  PixelStatistics statistics[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if constexpr (kLow) {
      statistics[r] = PixelStatistics::of(float(affine.channels), mean[r], deviations[kRows + r],
                                          deviations[r], tensors.eps);
    } else {
      statistics[r] = PixelStatistics::of(share, mean[r], deviations[r], tensors.eps);
    }
  }

#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    float2 entries[kVector];
#pragma unroll
    for (int pair = 0; pair < kVector / kPair; ++pair) {
      auto const two = Pack<float, 2 * kPair>::load(
          reinterpret_cast<float const*>(table + place_of(k, pair, lane)));
#pragma unroll
      for (int i = 0; i < kPair; ++i) {
        entries[pair * kPair + i] = make_float2(two.values[2 * i], two.values[2 * i + 1]);
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (!exists(r, k)) continue;
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        float& value = values[r][k][v];
        value = statistics[r].template normalized<kLow>(value, entries[v]);
      }
      groupnorm::activate_after<kKnown>(affine, values[r][k]);
      store_values<U, kVector>(values[r][k], tensors.output + base + r * row_step + k * pack_step);
    }
  }
  each_other([&](float (&others)[kVector], int offset) {
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      others[v] = statistics[0].template normalized<kLow>(
          others[v], weight_and_bias_of(affine, lane * kVector + offset + v));
    }
    groupnorm::activate_after<kKnown>(affine, others);
    store_values<U, kVector>(others, tensors.output + base + offset);
  });
}

template <int kVector, class T, class U>
void launch(GroupNormProblem const& p, Tensors<T, U> const& tensors, cudaStream_t stream) {
  constexpr int kMostPacks = kPacksOf<kVector, 1>;
  int64_t const packs = ceil_div(p.channels, kVector);
  auto const launch_rows = [&](auto rows, int lane_bits) {
    constexpr int kRows = rows.value;
    int64_t const of_block = int64_t(kRowThreads >> lane_bits) * kRows;
    int const shared_bytes =
        kPacksOf<kVector, kRows> * (kVector << lane_bits) * int(sizeof(float2));
    dim3 const grid =
        device::checked_grid("normalize_channels_last", ceil_div(p.batch * p.pixels, of_block));
    auto const launch_as = [&](auto known) {
      device::launch(normalize_channels_last<T, U, kVector, kRows, known.value>, grid, kRowThreads,
                     shared_bytes, stream, tensors, p.batch * p.pixels, lane_bits);
    };
    if constexpr (kVector > 1 && std::is_same_v<T, U>) {
      groupnorm::dispatch_known<true, groupnorm::kNoActivation, groupnorm::kQuickGeluAfter>(
          p, launch_as);
    } else {
      launch_as(std::integral_constant<int, groupnorm::kAnyActivation>{});
    }
    FUSEDCONV_CUDA("normalize_channels_last", cudaGetLastError());
  };
  // Packs that threads have in vain cost time: as few of them as can be, then as few to a thread.
  int lane_bits = bits_for(std::min<int64_t>(packs, 32));
  auto const covered = [&](int bits) { return round_up(packs, int64_t(1) << bits); };
  if constexpr (kVector > 1) {
    if (packs <= 32 && covered(lane_bits) <= packs + packs / 4) {
      return launch_rows(std::integral_constant<int, kShortRows>{}, lane_bits);
    }
  }
  for (int bits = lane_bits; bits > 0 && packs <= int64_t(kMostPacks) << (bits - 1);) {
    --bits;
    if (covered(bits) < covered(lane_bits)) lane_bits = bits;
  }
  if constexpr (kVector == 4) {
    if (packs <= int64_t(kPacksOf<kVector, 2>) << lane_bits) {
      return launch_rows(std::integral_constant<int, 2>{}, lane_bits);
    }
  }
  launch_rows(std::integral_constant<int, 1>{}, lane_bits);
}

}  // namespace

void layer_norm_channels_last(GroupNormProblem const& p, GroupNormTensors const& given,
                              cudaStream_t stream) {
  dispatch_tensors(p, given, [&](auto const& tensors) {
    constexpr int kVector = 16 / int(sizeof(*tensors.input));
    if (serves(tensors, p.channels, kVector)) return launch<kVector>(p, tensors, stream);
    launch<1>(p, tensors, stream);
  });
}

}  // namespace fusedconv::layernorm
