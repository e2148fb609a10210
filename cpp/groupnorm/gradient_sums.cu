#include <type_traits>

#include "cuda/launch.hpp"
#include "cuda/math.hpp"
#include "cuda/store.hpp"
#include "cuda/sum.hpp"
#include "cuda/tile.hpp"
#include "fusedconv/check.hpp"
#include "groupnorm/gradient.hpp"
#include "groupnorm/gradient_device.hpp"
#include "groupnorm/gradient_rows.hpp"
#include "groupnorm/launch.hpp"
#include "groupnorm/partition.hpp"
#include "groupnorm/support.hpp"

namespace fusedconv::groupnorm {
namespace {

using device::Pack;

// Valid in thread 0.
__device__ __forceinline__ float2 block_sum(float2 value) {
  __shared__ float2 shared[kThreads / 32];
  value = warp_sum(value);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x < 32) {
    value = warp_sum(threadIdx.x < kThreads / 32 ? shared[threadIdx.x] : float2{});
  }
  return value;
}

// ---- partial sums ----

// Channels first. Block (split, plane): partial sums of g and g xhat, [plane, split].
template <class T, class G, int kVector, int kKnown>
__global__ void __launch_bounds__(kThreads)
    sums_of_planes(T const* __restrict__ input, G const* __restrict__ grad, GradientAffine affine,
                   int64_t pixels, int64_t split_size, int splits, float2* __restrict__ partials) {
  int const plane = int(blockIdx.x / unsigned(splits));
  int64_t const begin = int64_t(blockIdx.x % unsigned(splits)) * split_size;
  int64_t const base = int64_t(plane) * pixels + begin;
  AlignedRun<kVector> const run(base, min(split_size, pixels - begin));
  auto const channel = Channel::of(affine, plane / affine.channels, plane % affine.channels);
  T const* const x = input + base + run.head;
  G const* const g = grad + base + run.head;
  float2 sums{};
  auto const add = [&](auto const& px, auto const& pg) {
    float2 part{};
    Point points[std::extent_v<decltype(px.values)>];
    points_of<kKnown>(px, pg, [&](int) { return channel; }, affine, points);
#pragma unroll
    for (Point const& point : points) {
      part.x += point.gradient;
      part.y = fmaf(point.gradient, point.normalized, part.y);
    }
    sums.x += part.x;
    sums.y += part.y;
  };
  constexpr int kAhead = 2;
  int64_t i = threadIdx.x;
  for (; i + (kAhead - 1) * kThreads < run.vectors; i += kAhead * kThreads) {
    Pack<T, kVector> px[kAhead];
    Pack<G, kVector> pg[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      px[j] = Pack<T, kVector>::load(x + (i + j * kThreads) * kVector);
      pg[j] = Pack<G, kVector>::load(g + (i + j * kThreads) * kVector);
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) add(px[j], pg[j]);
  }
  for (; i < run.vectors; i += kThreads) {
    add(Pack<T, kVector>::load(x + i * kVector), Pack<G, kVector>::load(g + i * kVector));
  }
  if constexpr (kVector > 1) {
    if (int(threadIdx.x) < run.singles) {
      int64_t const at = base + run.single(threadIdx.x);
      add(Pack<T, 1>::load(input + at), Pack<G, 1>::load(grad + at));
    }
  }
  float2 const total = block_sum(sums);
  if (threadIdx.x == 0) partials[blockIdx.x] = total;
}

// ---- merging ----

// One block per (sample, group): channel sums [sample, channel], of `count` partial sums each, and
// the group's terms.
__global__ void __launch_bounds__(kThreads)
    merge_sums(float2 const* __restrict__ partials, GradientAffine affine, int count,
               bool channels_last, float elements, float2* __restrict__ sums,
               GroupTerms* __restrict__ terms) {
  int const sample = int(blockIdx.x / unsigned(affine.groups));
  int const group = int(blockIdx.x % unsigned(affine.groups));
  int const warp = threadIdx.x / 32;
  float2 weighted{};
  for (int c = warp; c < affine.channels_per_group; c += kThreads / 32) {
    int const channel = group * affine.channels_per_group + c;
    int64_t const plane = int64_t(sample) * affine.channels + channel;
    float2 total{};
    for (int i = threadIdx.x % 32; i < count; i += 32) {
      float2 const partial =
          channels_last ? partials[(int64_t(sample) * count + i) * affine.channels + channel]
                        : partials[plane * count + i];
      total.x += partial.x;
      total.y += partial.y;
    }
    total = warp_sum(total);
    if (threadIdx.x % 32 == 0) {
      sums[plane] = total;
      float const weight = weight_of(affine, channel);
      weighted.x = fmaf(weight, total.x, weighted.x);
      weighted.y = fmaf(weight, total.y, weighted.y);
    }
  }
  weighted = block_sum(weighted);
  if (threadIdx.x == 0) terms[blockIdx.x] = {weighted.x / elements, weighted.y / elements};
}

__device__ __forceinline__ float sum_of(float value) { return value; }
__device__ __forceinline__ float sum_of(float4 const& v) { return (v.x + v.y) + (v.z + v.w); }

// A thread's share of a channel's parts over all samples, by loads of type V, several of which are
// under way.
template <class V>
__device__ __forceinline__ float sum_of_parts(float const* sums, int64_t batch, int channels,
                                              int channel, int parts) {
  constexpr int kAhead = 8;
  int const count = parts / int(sizeof(V) / sizeof(float));
  int const step = kThreads / count, rest = kThreads % count;
  int64_t n = int(threadIdx.x) / count;
  int i = int(threadIdx.x) % count;
  float sum = 0.0f;
  while (n < batch) {
    V loaded[kAhead] = {};
#pragma unroll
    for (V& value : loaded) {
      if (n < batch) value = reinterpret_cast<V const*>(sums + (n * channels + channel) * parts)[i];
      n += step;
      i += rest;
      if (i >= count) {
        i -= count;
        ++n;
      }
    }
#pragma unroll
    for (V const& value : loaded) sum += sum_of(value);
  }
  return sum;
}

// Block: a channel's sums over all samples.
__global__ void __launch_bounds__(kThreads)
    sums_over_samples(float2 const* __restrict__ sums, int64_t batch, int channels,
                      AffineTargets const targets) {
  int const channel = int(blockIdx.x);
  float2 total{};
  for (int64_t n = threadIdx.x; n < batch; n += kThreads) {
    total.x += sums[n * channels + channel].x;
    total.y += sums[n * channels + channel].y;
  }
  total = block_sum(total);
  if (threadIdx.x == 0) {
    DType const dtype = targets.dtype;
    if (targets.weight != nullptr) {
      device::store_from_float(targets.weight, channel, dtype, total.y);
    }
    if (targets.bias != nullptr) device::store_from_float(targets.bias, channel, dtype, total.x);
  }
  if (targets.conv_bias == nullptr) return;
  bool const is_aligned =
      targets.parts % 4 == 0 && reinterpret_cast<uintptr_t>(targets.sums) % sizeof(float4) == 0;
  float sum = is_aligned
                  ? sum_of_parts<float4>(targets.sums, batch, channels, channel, targets.parts)
                  : sum_of_parts<float>(targets.sums, batch, channels, channel, targets.parts);
  sum = device::block_total<kThreads>(sum);
  if (threadIdx.x == 0) {
    device::store_from_float(targets.conv_bias, channel, targets.conv_dtype, sum);
  }
}

// ---- launches ----

template <class T, class G, bool kActivate>
void launch_sums(GroupNormProblem const& p, GradientTensors const& tensors, GradientSum* partials,
                 cudaStream_t stream) {
  auto const* x = static_cast<T const*>(tensors.input);
  auto const* g = static_cast<G const*>(tensors.grad_output);
  GradientAffine const affine = gradient_affine_of(p, tensors);
  Split const split = split_gradients(p);
  dim3 const grid = device::checked_grid("sums_of_planes", p.batch * p.channels * split.count);
  dispatch_gradients<T, G, kActivate>(p, tensors, true, [&](auto vector, auto known) {
    device::launch(sums_of_planes<T, G, vector.value, known.value>, grid, kThreads, 0, stream, x, g,
                   affine, p.pixels, split.size, split.count, partials);
  });
  FUSEDCONV_CUDA("gradient_sums", cudaGetLastError());
}

}  // namespace

GradientConfig gradient_sums_config(GroupNormProblem const& p, bool in_lines) {
  GradientConfig config;
  check(p);
  config.support = supports_gradient_form(p);
  if (!config.support) return config;
  if (p.batch == 0 || p.pixels == 0) {
    config.support = Support::no("the input is empty");
  } else if (p.batch * p.channels > 0x7fffffff) {
    config.support = Support::no(detail::join("batch x channels is ", p.batch * p.channels));
  } else {
    config.set_sizes(p, split_gradients(p).count);
    bool const last = p.input_layout == Layout::kChannelsLast;
    Split const split = !last      ? split_planes(p, true)
                        : in_lines ? split_rows_to_planes(p)
                                   : split_gradient_rows(p);
    config.channel_sums = split.count;
  }
  return config;
}

void gradient_sums(GroupNormProblem const& p, GradientTensors const& tensors, GradientSum* partials,
                   cudaStream_t stream) {
  if (p.input_layout == Layout::kChannelsLast) {
    return sum_gradients_of_rows(p, tensors, partials, stream);
  }
  dispatch_gradient_kernel(p, [&](auto zero, auto grad, auto active) {
    launch_sums<decltype(zero), decltype(grad), active.value>(p, tensors, partials, stream);
  });
}

void merge_gradient_sums(GradientBuffers const& buffers, GroupNormProblem const& p,
                         void const* weight, GradientSum const* partials, GradientSum* sums,
                         GroupTerms* terms, cudaStream_t stream) {
  bool const last = p.input_layout == Layout::kChannelsLast;
  GradientAffine const affine = gradient_affine_of(p, {.weight = weight});
  device::launch(merge_sums, device::checked_grid("merge_sums", p.batch * p.groups), kThreads, 0,
                 stream, partials, affine, buffers.partials, last, float(p.group_size()), sums,
                 terms);
  FUSEDCONV_CUDA("merge_gradient_sums", cudaGetLastError());
}

void affine_gradients(GroupNormProblem const& p, GradientSum const* sums,
                      AffineTargets const& targets, cudaStream_t stream) {
  dim3 const grid = device::checked_grid("affine_gradients", p.channels);
  device::launch(sums_over_samples, grid, kThreads, 0, stream, sums, p.batch, int(p.channels),
                 targets);
  FUSEDCONV_CUDA("affine_gradients", cudaGetLastError());
}

}  // namespace fusedconv::groupnorm
