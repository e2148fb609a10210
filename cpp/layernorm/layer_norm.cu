#include "layernorm/layer_norm.hpp"

#include <algorithm>
#include <bit>
#include <type_traits>

#include "cuda/math.hpp"
#include "cuda/tile.hpp"
#include "fusedconv/check.hpp"
#include "groupnorm/affine.hpp"
#include "groupnorm/launch.hpp"
#include "groupnorm/moments.hpp"

namespace fusedconv::layernorm {
namespace {

using device::Pack;
using groupnorm::Affine;
using groupnorm::ChannelAffine;
using groupnorm::Statistics;

constexpr int kMostThreads = 512;      // of a block over channels first
constexpr int kRowThreads = 256;       // of a block over channels last
constexpr int kRunBytes = 128;         // of neighbouring pixels of a channel, which a block reads
constexpr int kSmallestRunBytes = 32;  // the same of so many channels that fewer pixels fit
constexpr int kSums = 3;               // of a pixel, in shared memory

constexpr int kFirstVector = 4;  // pixels of an access to channels first
constexpr int kHeldBytes = 128;  // of a thread's packs

// Registers hold so many packs of a thread between the passes over them; what is left of many
// channels is read again, mostly from the L2 cache.
template <class T, int kVector>
constexpr int kMostPacks = kVector == 1 ? 16 : kHeldBytes / kVector / int(sizeof(T));

// The packs of a thread: first, first + step, ... below count, `stride` elements from each to the
// next one of all. Channels first a pack is one channel of kVector pixels, and threads with the
// same pixels are `lanes` apart; channels last it is kVector channels of a pixel, which `lanes`
// neighbouring threads share.
struct Part {
  int64_t base;
  int64_t stride;
  int first;
  int step;
  int count;
};

// Sums over the threads that share a pixel, in all of them; in a fixed order. `shared` is used once
// between barriers.
template <Layout kLayout, int kCount>
__device__ __forceinline__ void sum_over_threads(float (&values)[kCount], int lanes,
                                                 float* shared) {
  int const last = kLayout == Layout::kChannelsFirst ? 32 : lanes;
  for (int step = kLayout == Layout::kChannelsFirst ? lanes : 1; step < last; step *= 2) {
#pragma unroll
    for (float& value : values) value += __shfl_xor_sync(~0u, value, step);
  }
  if constexpr (kLayout == Layout::kChannelsFirst) {
    int const warps = int(blockDim.x) / 32;
    if (warps == 1) return;
    int const lane = int(threadIdx.x) % lanes;
    if (int(threadIdx.x) % 32 < lanes) {
      int const warp = int(threadIdx.x) / 32;
#pragma unroll
      for (int v = 0; v < kCount; ++v) shared[(warp * kCount + v) * lanes + lane] = values[v];
    }
    __syncthreads();
#pragma unroll
    for (float& value : values) value = 0.0f;
    for (int warp = 0; warp < warps; ++warp) {
#pragma unroll
      for (int v = 0; v < kCount; ++v) values[v] += shared[(warp * kCount + v) * lanes + lane];
    }
  }
}

// A thread
// 1. loads its packs,
// 2. takes the mean of its pixels' channels with the other threads of these pixels,
// 3. takes squared deviations from that, and what rounding left of the mean,
// 4. normalises and stores.
template <class T, class U, int kVector, Layout kLayout>
__device__ __forceinline__ void normalize_part(T const* input, U* output, Affine const& affine,
                                               float eps, int lanes, Part const& part,
                                               float* shared, int shared_floats) {
  constexpr bool kFirst = kLayout == Layout::kChannelsFirst;
  constexpr int kPixels = kFirst ? kVector : 1;
  constexpr int kPacks = kMostPacks<T, kVector>;
  Pack<T, kVector> packs[kPacks];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    int const index = part.first + k * part.step;
    if (index < part.count) {
      packs[k] = Pack<T, kVector>::load(input + part.base + index * part.stride);
    }
  }
  auto const each = [&](auto&& body) {
    auto const call = [&](Pack<T, kVector> const& pack, int index) {
      float values[kVector];
#pragma unroll
      for (int v = 0; v < kVector; ++v) values[v] = device::to_float(pack.values[v]);
      groupnorm::activate_by_call(affine.activation_before, affine.quick, values);
      body(values, index);
    };
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      int const index = part.first + k * part.step;
      packs[k].forget();
      if (index < part.count) call(packs[k], index);
    }
    for (int index = part.first + kPacks * part.step; index < part.count; index += part.step) {
      call(Pack<T, kVector>::load(input + part.base + index * part.stride), index);
    }
  };

  float const count = float(affine.channels);
  float mean[kPixels] = {};
  each([&](float (&values)[kVector], int) {
#pragma unroll
    for (int v = 0; v < kVector; ++v) mean[v % kPixels] += values[v];
  });
  sum_over_threads<kLayout>(mean, lanes, shared);
#pragma unroll
  for (float& value : mean) value /= count;

  float sums[2 * kPixels] = {};  // of deviations, of their squares
  each([&](float (&values)[kVector], int) {
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      float const deviation = values[v] - mean[v % kPixels];
      float& squares = sums[kPixels + v % kPixels];
      sums[v % kPixels] += deviation;
      squares = fmaf(deviation, deviation, squares);
    }
  });
  sum_over_threads<kLayout>(sums, lanes, shared + shared_floats);
  Statistics statistics[kPixels];
#pragma unroll
  for (int v = 0; v < kPixels; ++v) {
    float const low = sums[v] / count;
    float const m2 = fmaf(-sums[v], low, sums[kPixels + v]);
    // Rounding may leave less than nothing where all channels are equal; NaN stays.
    device::Moments const moments{count, mean[v], low, m2 < 0.0f ? 0.0f : m2};
    statistics[v] = {mean[v], low, device::reciprocal_deviation(moments, eps)};
  }

  each([&](float (&values)[kVector], int index) {
    float weight = 1.0f;
    float bias = 0.0f;
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      if (v == 0 || !kFirst) {
        int const channel = kFirst ? index : index * kVector + v;
        weight = groupnorm::weight_of(affine, channel);
        bias = groupnorm::bias_of(affine, channel);
      }
      auto const channel = ChannelAffine::of(statistics[v % kPixels], weight, bias);
      values[v] = fmaf(values[v] - channel.mean, channel.scale, channel.shift);
    }
    groupnorm::activate_by_call(affine.activation_after, affine.quick, values);
    Pack<U, kVector> result;
#pragma unroll
    for (int v = 0; v < kVector; ++v) result.values[v] = device::from_float<U>(values[v]);
    result.store(output + part.base + index * part.stride);
  });
}

template <class T, class U, int kVector>
__global__ void __launch_bounds__(kMostThreads, 2)
    normalize_channels_first(T const* input, U* output, Affine affine, float eps, int64_t pixels,
                             int64_t tiles, int lanes) {
  extern __shared__ float shared[];  // [kSums][warps][lanes * kVector]
  int64_t const pixel = (blockIdx.x % tiles * lanes + int(threadIdx.x) % lanes) * int64_t(kVector);
  Part const part{.base = blockIdx.x / tiles * affine.channels * pixels + pixel,
                  .stride = pixels,
                  .first = int(threadIdx.x) / lanes,
                  .step = int(blockDim.x) / lanes,
                  .count = pixel < pixels ? affine.channels : 0};
  normalize_part<T, U, kVector, Layout::kChannelsFirst>(
      input, output, affine, eps, lanes, part, shared, int(blockDim.x) / 32 * lanes * kVector);
}

template <class T, class U, int kVector>
__global__ void __launch_bounds__(kRowThreads)
    normalize_channels_last(T const* input, U* output, Affine affine, float eps, int64_t rows,
                            int lanes) {
  int64_t const row = (int64_t(blockIdx.x) * kRowThreads + int(threadIdx.x)) / lanes;
  Part const part{.base = row * affine.channels,
                  .stride = kVector,
                  .first = int(threadIdx.x) % lanes,
                  .step = lanes,
                  .count = row < rows ? affine.channels / kVector : 0};
  normalize_part<T, U, kVector, Layout::kChannelsLast>(input, output, affine, eps, lanes, part,
                                                       nullptr, 0);
}

int power_of_two(int64_t most, int64_t wanted) {
  return int(std::bit_ceil(uint64_t(std::clamp<int64_t>(wanted, 1, most))));
}

template <class T, class U, int kVector>
void launch_channels_first(GroupNormProblem const& p, T const* input, U* output,
                           Affine const& affine, cudaStream_t stream) {
  constexpr int kPacks = kMostPacks<T, kVector>;
  auto const lanes_of = [](int bytes) { return bytes / int(sizeof(T)) / kVector; };
  int const most = kVector == 1 ? 32 : lanes_of(kRunBytes);
  int const least = kVector == 1 ? 32 : lanes_of(kSmallestRunBytes);
  int lanes = most;
  while (lanes > least && p.channels > kPacks * (kMostThreads / lanes)) lanes /= 2;
  lanes = std::min(lanes, power_of_two(most, ceil_div(p.pixels, kVector)));
  int const threads =
      int(std::min<int64_t>(kMostThreads, round_up(lanes * ceil_div(p.channels, kPacks), 32)));
  int64_t const tiles = ceil_div(p.pixels, lanes * kVector);
  int const shared_bytes = kSums * threads / 32 * lanes * kVector * int(sizeof(float));
  dim3 const grid = device::checked_grid("normalize_channels_first", p.batch * tiles);
  normalize_channels_first<T, U, kVector><<<grid, threads, shared_bytes, stream>>>(
      input, output, affine, float(p.eps), p.pixels, tiles, lanes);
  FUSEDCONV_CUDA("normalize_channels_first", cudaGetLastError());
}

template <class T, class U, int kVector>
void launch_channels_last(GroupNormProblem const& p, T const* input, U* output,
                          Affine const& affine, cudaStream_t stream) {
  int64_t const packs = ceil_div(p.channels, kVector);
  int const lanes = power_of_two(32, ceil_div(2 * packs, kMostPacks<T, kVector>));
  int64_t const rows = p.batch * p.pixels;
  dim3 const grid =
      device::checked_grid("normalize_channels_last", ceil_div(rows * lanes, kRowThreads));
  normalize_channels_last<T, U, kVector>
      <<<grid, kRowThreads, 0, stream>>>(input, output, affine, float(p.eps), rows, lanes);
  FUSEDCONV_CUDA("normalize_channels_last", cudaGetLastError());
}

template <class T, class U>
void launch(GroupNormProblem const& p, GroupNormTensors const& tensors, cudaStream_t stream) {
  auto const* input = static_cast<T const*>(tensors.input);
  auto* output = static_cast<U*>(tensors.output);
  Affine const affine = groupnorm::affine_of(p, tensors.weight, tensors.bias, nullptr);
  constexpr int kVector = 16 / sizeof(T);
  bool const first = p.input_layout == Layout::kChannelsFirst;
  bool const vectors = (first ? p.pixels % kFirstVector : p.channels % kVector) == 0 &&
                       device::is_aligned(input, 16) && device::is_aligned(output, 16);
  auto const launch_as = [&](auto vector) {
    if (first) {
      constexpr int kPixels = vector.value == 1 ? 1 : kFirstVector;
      launch_channels_first<T, U, kPixels>(p, input, output, affine, stream);
    } else {
      launch_channels_last<T, U, vector.value>(p, input, output, affine, stream);
    }
  };
  if (vectors) return launch_as(std::integral_constant<int, kVector>{});
  launch_as(std::integral_constant<int, 1>{});
}

}  // namespace

void check(GroupNormProblem const& p) {
  groupnorm::check(p);
  FUSEDCONV_CHECK(p.output_layout == p.input_layout, "layer_norm: output layout: got ",
                  name_of(p.output_layout), " for input of ", name_of(p.input_layout));
  FUSEDCONV_CHECK(p.output_dtype == p.dtype || p.output_dtype == DType::kFloat32,
                  "layer_norm: output dtype: got ", name_of(p.output_dtype), " for input of ",
                  name_of(p.dtype));
  FUSEDCONV_CHECK(p.input_row_channels() == p.channels, "layer_norm: row_channels: got ",
                  p.row_channels);
}

void layer_norm(GroupNormProblem const& p, GroupNormTensors const& tensors, cudaStream_t stream) {
  check(p);
  if (p.batch == 0 || p.pixels == 0) return;
  device::dispatch_type(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (p.output_dtype == p.dtype) return launch<T, T>(p, tensors, stream);
    if constexpr (!std::is_same_v<T, float>) launch<T, float>(p, tensors, stream);
  });
}

}  // namespace fusedconv::layernorm
