#include "cuda/launch.hpp"
#include "layernorm/passes.hpp"
#include "layernorm/pixel.hpp"

namespace fusedconv::layernorm {
namespace {

// Values of a thread, in registers between the passes over them: what threads prepare and share
// costs the less of each value the more there are of them. Calls need registers of their own.
template <class T, int kKnown>
constexpr int kHeld = kKnown == groupnorm::kAnyActivation ? 32 : 128 / int(sizeof(T));
constexpr int kMostThreads = 384;
// Blocks of these in a multiprocessor, at least.
template <class T, int kKnown>
constexpr int kBlocks = sizeof(T) == 4 && kKnown != groupnorm::kAnyActivation ? 3 : 2;
constexpr int kMostChannels = 4096;    // in registers, with weights and biases in shared memory
constexpr int kCall = 4;               // values whose activations share a call
constexpr int kRunBytes = 128;         // of neighbouring pixels of a channel, which a block reads
constexpr int kSmallestRunBytes = 32;  // the same of so many channels that fewer pixels fit

// 2^lane_bits neighbouring threads have kVector pixels each, of as many channels as registers hold.
// kWhole: each thread's channels exist or none of them does, and all are in registers.
template <class T, class U, int kVector, bool kWhole, int kKnown>
__global__ void __launch_bounds__(kMostThreads, kBlocks<T, kKnown>)
    normalize_channels_first(Tensors<T, U> const tensors, int64_t pixels, unsigned tiles,
                             int lane_bits) {
  constexpr int kPacks = kHeld<T, kKnown> / kVector;
  constexpr int kAtOnce = kCall / kVector;  // packs
  constexpr bool kLow = kKeepsLow<T>;
  extern __shared__ float4 shared[];
  Affine const& affine = tensors.affine;
  int const lane = int(threadIdx.x) & ((1 << lane_bits) - 1);
  int const part = int(threadIdx.x) >> lane_bits;
  int const parts = int(blockDim.x) >> lane_bits;
  int const held = min(affine.channels, parts * kPacks);
  float2* const table = reinterpret_cast<float2*>(shared);  // [held, to whole packs]
  float* const sums = reinterpret_cast<float*>(table + parts * kPacks);

  unsigned const block = device::block_from_last();
  int64_t const pixel = (int64_t(block % tiles) << lane_bits | lane) * kVector;
  int64_t const base = int64_t(block / tiles) * affine.channels * pixels + pixel;
  int const first = part * kPacks;
  int const last = pixel < pixels ? affine.channels : 0;
  auto const exists = [&](int k) { return (kWhole ? first : first + k) < last; };
  float values[kHeld<T, kKnown>] = {};
  {
    T const* source = tensors.input + base + first * pixels;
#pragma unroll
    for (int k = 0; k < kPacks; ++k, source += pixels) {
      if (exists(k)) load_values<T, kVector>(source, values + k * kVector);
    }
  }
  for (int channel = threadIdx.x; channel < held; channel += blockDim.x) {
    table[channel] = weight_and_bias_of(affine, channel);
  }
  groupnorm::activate<kKnown>(affine.activation_before, affine.quick, values);
  // The channels beyond those held.
  auto const each_other = [&](auto&& body) {
    if constexpr (!kWhole) {
#pragma unroll 1
      for (int channel = held + part; channel < last; channel += parts) {
        float others[kVector];
        load_values<T, kVector>(tensors.input + base + channel * pixels, others);
        groupnorm::activate<kKnown>(affine.activation_before, affine.quick, others);
        body(others, channel);
      }
    }
  };

  float const count = float(affine.channels), share = 1.0f / count;
  float mean[kVector] = {};
  auto const add = [&](float const* some) {
#pragma unroll
    for (int v = 0; v < kVector; ++v) mean[v] += some[v];
  };
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    if (exists(k)) add(values + k * kVector);
  }
  each_other([&](float const(&others)[kVector], int) { add(others); });
  constexpr int kSums = kLow ? 2 : 1;  // of a pixel: squares, deviations
  sum_over_block(mean, lane_bits, sums + (blockDim.x / 32 << lane_bits) * (kSums * kVector));
#pragma unroll
  for (float& value : mean) value = quotient(value, count, share);

  float deviations[kSums * kVector] = {};
  auto const add_deviations = [&](float const* some) {
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      float const deviation = some[v] - mean[v];
      deviations[v] = fmaf(deviation, deviation, deviations[v]);
      if constexpr (kLow) deviations[kVector + v] += deviation;
    }
  };
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    if (exists(k)) add_deviations(values + k * kVector);
  }
  each_other([&](float const(&others)[kVector], int) { add_deviations(others); });
  sum_over_block(deviations, lane_bits, sums);
  if (blockDim.x == 32) __syncwarp();  // the table; else barriers were passed
  PixelStatistics statistics[kVector];
#pragma unroll
  for (int v = 0; v < kVector; ++v) {
    if constexpr (kLow) {
      statistics[v] = PixelStatistics::of(float(affine.channels), mean[v], deviations[kVector + v],
                                          deviations[v], tensors.eps);
    } else {
      statistics[v] = PixelStatistics::of(share, mean[v], deviations[v], tensors.eps);
    }
  }

  U* target = tensors.output + base + first * pixels;
#pragma unroll
  for (int k = 0; k < kPacks; k += kAtOnce) {
    if (!exists(k)) continue;
    float results[kCall];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      float2 const entry = table[first + k + i];
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        results[i * kVector + v] =
            statistics[v].template normalized<kLow>(values[(k + i) * kVector + v], entry);
      }
    }
    groupnorm::activate_after<kKnown>(affine, results);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i, target += pixels) {
      if (exists(k + i)) store_values<U, kVector>(results + i * kVector, target);
    }
  }
  each_other([&](float (&others)[kVector], int channel) {
    float2 const entry = weight_and_bias_of(affine, channel);
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      others[v] = statistics[v].template normalized<kLow>(others[v], entry);
    }
    groupnorm::activate_after<kKnown>(affine, others);
    store_values<U, kVector>(others, tensors.output + base + channel * pixels);
  });
}

// Of blocks whose threads have kPacks channels each.
struct Shape {
  int lane_bits;
  int threads;
  bool whole;

  template <class T, int kVector>
  static Shape of(GroupNormProblem const& p, int packs) {
    auto const lanes_of = [](int bytes) { return std::min(bytes / int(sizeof(T)) / kVector, 32); };
    int64_t const parts = ceil_div(std::min<int64_t>(p.channels, kMostChannels), packs);
    int bits = bits_for(std::min<int64_t>(lanes_of(kRunBytes), ceil_div(p.pixels, kVector)));
    while (1 << bits > lanes_of(kSmallestRunBytes) && parts << bits > kMostThreads) --bits;
    int const threads = int(std::min<int64_t>(kMostThreads, round_up(parts << bits, 32)));
    int64_t const held = int64_t(threads >> bits) * packs;
    return {bits, threads, p.channels % packs == 0 && p.channels <= held};
  }
};

template <int kVector, class T, class U>
void launch(GroupNormProblem const& p, Tensors<T, U> const& tensors, cudaStream_t stream) {
  auto const launch_as = [&](auto known, auto whole, Shape const& shape) {
    constexpr int kPacks = kHeld<T, known.value> / kVector;
    int const lane_bits = shape.lane_bits, threads = shape.threads;
    int64_t const tiles = ceil_div(p.pixels, int64_t(kVector) << lane_bits);
    int const shared_bytes = (threads >> lane_bits) * kPacks * int(sizeof(float2)) +
                             3 * (threads / 32 << lane_bits) * kVector * int(sizeof(float));
    dim3 const grid = device::checked_grid("normalize_channels_first", p.batch * tiles);
    device::launch(normalize_channels_first<T, U, kVector, whole.value, known.value>, grid, threads,
                   shared_bytes, stream, tensors, p.pixels, unsigned(tiles), lane_bits);
    FUSEDCONV_CUDA("normalize_channels_first", cudaGetLastError());
  };
  auto const launch_known = [&](auto known) {
    Shape const shape = Shape::of<T, kVector>(p, kHeld<T, known.value> / kVector);
    if constexpr (known.value != groupnorm::kAnyActivation) {
      if (shape.whole) return launch_as(known, std::true_type{}, shape);
    }
    launch_as(known, std::false_type{}, shape);
  };
  if constexpr (kVector > 1 && std::is_same_v<T, U>) {
    groupnorm::dispatch_known<true, groupnorm::kNoActivation, groupnorm::kQuickGeluAfter>(
        p, launch_known);
  } else {
    launch_known(std::integral_constant<int, groupnorm::kAnyActivation>{});
  }
}

}  // namespace

void layer_norm_channels_first(GroupNormProblem const& p, GroupNormTensors const& given,
                               cudaStream_t stream) {
  dispatch_tensors(p, given, [&](auto const& tensors) {
    if (serves(tensors, p.pixels, 2)) return launch<2>(p, tensors, stream);
    launch<1>(p, tensors, stream);
  });
}

}  // namespace fusedconv::layernorm
