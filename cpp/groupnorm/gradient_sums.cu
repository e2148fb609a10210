#include <type_traits>

#include "cuda/math.hpp"
#include "cuda/store.hpp"
#include "cuda/tile.hpp"
#include "fusedconv/check.hpp"
#include "groupnorm/gradient.hpp"
#include "groupnorm/gradient_device.hpp"
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
template <class T, int kVector, int kKnown>
__global__ void __launch_bounds__(kThreads)
    sums_of_planes(T const* __restrict__ input, T const* __restrict__ grad, GradientAffine affine,
                   int64_t pixels, int64_t split_size, int splits, float2* __restrict__ partials) {
  int const plane = int(blockIdx.x / unsigned(splits));
  int64_t const begin = int64_t(blockIdx.x % unsigned(splits)) * split_size;
  int64_t const base = int64_t(plane) * pixels + begin;
  AlignedRun<kVector> const run(base, min(split_size, pixels - begin));
  auto const channel = Channel::of(affine, plane / affine.channels, plane % affine.channels);
  T const* const x = input + base + run.head;
  T const* const g = grad + base + run.head;
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
    Pack<T, kVector> pg[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      px[j] = Pack<T, kVector>::load(x + (i + j * kThreads) * kVector);
      pg[j] = Pack<T, kVector>::load(g + (i + j * kThreads) * kVector);
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) add(px[j], pg[j]);
  }
  for (; i < run.vectors; i += kThreads) {
    add(Pack<T, kVector>::load(x + i * kVector), Pack<T, kVector>::load(g + i * kVector));
  }
  if constexpr (kVector > 1) {
    if (int(threadIdx.x) < run.singles) {
      int64_t const at = base + run.single(threadIdx.x);
      add(Pack<T, 1>::load(input + at), Pack<T, 1>::load(grad + at));
    }
  }
  float2 const total = block_sum(sums);
  if (threadIdx.x == 0) partials[blockIdx.x] = total;
}

// Channels last. Block (row block, slab) of a sample: partial sums [sample, row block, channel].
template <class T, int kVector, bool kActivate>
__global__ void __launch_bounds__(kThreads)
    sums_of_rows(T const* __restrict__ input, T const* __restrict__ grad, GradientAffine affine,
                 int64_t pixels, int64_t block_rows, int row_blocks, RowMap map,
                 float2* __restrict__ partials) {
  extern __shared__ float2 shared_sums[];  // [rows][columns * kVector]
  int64_t const sample = blockIdx.x / row_blocks;
  int64_t const row_block = blockIdx.x % row_blocks;
  int const map_row = threadIdx.x / map.columns;
  int const column = threadIdx.x % map.columns;
  int const first = (int(blockIdx.y) * map.columns + column) * kVector;
  float2 sums[kVector] = {};
  if (map_row < map.rows && first < affine.channels) {
    Channel channels[kVector];
#pragma unroll
    for (int v = 0; v < kVector; ++v) channels[v] = Channel::of(affine, sample, first + v);
    int64_t const end = min(pixels, (row_block + 1) * block_rows);
    int64_t const base = sample * pixels * affine.channels + first;
#pragma unroll 2
    for (int64_t row = row_block * block_rows + map_row; row < end; row += map.rows) {
      auto const px = Pack<T, kVector>::load(input + base + row * affine.channels);
      auto const pg = Pack<T, kVector>::load(grad + base + row * affine.channels);
      Point points[kVector];
      points_of<kActivate>(px, pg, [&](int v) { return channels[v]; }, affine, points);
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        sums[v].x += points[v].gradient;
        sums[v].y = fmaf(points[v].gradient, points[v].normalized, sums[v].y);
      }
    }
  }
  int const width = map.columns * kVector;
  if (map_row < map.rows) {
#pragma unroll
    for (int v = 0; v < kVector; ++v) shared_sums[map_row * width + column * kVector + v] = sums[v];
  }
  for (int count = map.rows; count > 1;) {
    int const half = (count + 1) / 2;
    __syncthreads();
    for (int i = threadIdx.x; i < (count - half) * width; i += kThreads) {
      shared_sums[i].x += shared_sums[half * width + i].x;
      shared_sums[i].y += shared_sums[half * width + i].y;
    }
    count = half;
  }
  __syncthreads();
  int64_t const base = (sample * row_blocks + row_block) * affine.channels;
  int const slab = int(blockIdx.y) * width;
  for (int i = threadIdx.x; i < width; i += kThreads) {
    if (slab + i < affine.channels) partials[base + slab + i] = shared_sums[i];
  }
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

// One warp per channel: its sums over all samples.
__global__ void __launch_bounds__(kThreads)
    sums_over_samples(float2 const* __restrict__ sums, int64_t batch, int channels,
                      void* grad_weight, void* grad_bias, DType dtype) {
  int const channel = int((blockIdx.x * kThreads + threadIdx.x) / 32);
  if (channel >= channels) return;
  float2 total{};
  for (int64_t n = threadIdx.x % 32; n < batch; n += 32) {
    total.x += sums[n * channels + channel].x;
    total.y += sums[n * channels + channel].y;
  }
  total = warp_sum(total);
  if (threadIdx.x % 32 == 0) {
    if (grad_weight != nullptr) device::store_from_float(grad_weight, channel, dtype, total.y);
    if (grad_bias != nullptr) device::store_from_float(grad_bias, channel, dtype, total.x);
  }
}

// ---- launches ----

template <class T, bool kActivate>
void launch_sums(GroupNormProblem const& p, GradientTensors const& tensors, GradientSum* partials,
                 cudaStream_t stream) {
  auto const* x = static_cast<T const*>(tensors.input);
  auto const* g = static_cast<T const*>(tensors.grad_output);
  GradientAffine const affine = gradient_affine_of(p, tensors);
  Split const split = split_gradients(p);
  dispatch_gradient_vector<T>(p, tensors, true, [&](auto vector) {
    constexpr int kVector = vector.value;
    if (p.input_layout == Layout::kChannelsLast) {
      RowMap const map = RowMap::of(p.channels, kVector);
      dim3 const grid = device::checked_grid("sums_of_rows", p.batch * split.count, map.slabs);
      int const shared = map.rows * map.columns * kVector * int(sizeof(GradientSum));
      sums_of_rows<T, kVector, kActivate><<<grid, kThreads, shared, stream>>>(
          x, g, affine, p.pixels, split.size, split.count, map, partials);
    } else {
      dim3 const grid = device::checked_grid("sums_of_planes", p.batch * p.channels * split.count);
      dispatch_known<kActivate, kQuickGeluBefore>(p, [&](auto known) {
        sums_of_planes<T, kVector, known.value><<<grid, kThreads, 0, stream>>>(
            x, g, affine, p.pixels, split.size, split.count, partials);
      });
    }
  });
  FUSEDCONV_CUDA("gradient_sums", cudaGetLastError());
}

}  // namespace

GradientConfig gradient_sums_config(GroupNormProblem const& p) {
  GradientConfig config;
  check(p);
  config.support = supports_same_form(p);
  if (!config.support) return config;
  if (p.batch == 0 || p.pixels == 0) {
    config.support = Support::no("the input is empty");
  } else if (p.batch * p.channels > 0x7fffffff) {
    config.support = Support::no(detail::join("batch x channels is ", p.batch * p.channels));
  } else {
    config.set_sizes(p, split_gradients(p).count);
    config.plane_sums = split_planes(p, true).count;
  }
  return config;
}

void gradient_sums(GroupNormProblem const& p, GradientTensors const& tensors, GradientSum* partials,
                   cudaStream_t stream) {
  dispatch_kernel(p, [&](auto zero, auto active) {
    launch_sums<decltype(zero), active.value>(p, tensors, partials, stream);
  });
}

void merge_gradient_sums(GradientBuffers const& buffers, GroupNormProblem const& p,
                         void const* weight, GradientSum const* partials, GradientSum* sums,
                         GroupTerms* terms, cudaStream_t stream) {
  bool const last = p.input_layout == Layout::kChannelsLast;
  GradientAffine const affine = gradient_affine_of(p, {.weight = weight});
  merge_sums<<<device::checked_grid("merge_sums", p.batch * p.groups), kThreads, 0, stream>>>(
      partials, affine, buffers.partials, last, float(p.group_size()), sums, terms);
  FUSEDCONV_CUDA("merge_gradient_sums", cudaGetLastError());
}

void affine_gradients(GroupNormProblem const& p, GradientSum const* sums, void* grad_weight,
                      void* grad_bias, cudaStream_t stream) {
  dim3 const grid = device::checked_grid("affine_gradients", ceil_div(p.channels * 32, kThreads));
  sums_over_samples<<<grid, kThreads, 0, stream>>>(sums, p.batch, int(p.channels), grad_weight,
                                                   grad_bias, p.affine_dtype);
  FUSEDCONV_CUDA("affine_gradients", cudaGetLastError());
}

}  // namespace fusedconv::groupnorm
