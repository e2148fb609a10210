#include "groupnorm/backward.hpp"

#include <algorithm>

#include "cuda/math.hpp"
#include "cuda/tile.hpp"
#include "fusedconv/check.hpp"
#include "groupnorm/affine.hpp"
#include "groupnorm/gradient.hpp"
#include "groupnorm/row_map.hpp"
#include "groupnorm/streamed_backward.hpp"

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

// ---- sums ---------------------------------------------------------------------------------------

// Channels first. Block (split, plane): partial sums of g and g xhat, [plane, split].
template <class T, int kVector, bool kActivate>
__global__ void __launch_bounds__(kThreads)
    sums_of_planes(T const* __restrict__ input, T const* __restrict__ grad, GradientAffine affine,
                   int64_t pixels, int64_t split_size, int splits, float2* __restrict__ partials) {
  int const plane = int(blockIdx.x / unsigned(splits));
  int64_t const begin = int64_t(blockIdx.x % unsigned(splits)) * split_size;
  int64_t const vectors = (min(split_size, pixels - begin)) / kVector;
  auto const channel = Channel::of(affine, plane / affine.channels, plane % affine.channels);
  T const* const x = input + int64_t(plane) * pixels + begin;
  T const* const g = grad + int64_t(plane) * pixels + begin;
  float2 sums{};
  constexpr int kAhead = 2;
  auto const add = [&](Pack<T, kVector> const& px, Pack<T, kVector> const& pg) {
    float2 part{};
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      Point const point = point_of<kActivate>(device::to_float(px.values[v]),
                                              device::to_float(pg.values[v]), channel, affine);
      part.x += point.gradient;
      part.y = fmaf(point.gradient, point.normalized, part.y);
    }
    sums.x += part.x;
    sums.y += part.y;
  };
  int64_t i = threadIdx.x;
  for (; i + (kAhead - 1) * kThreads < vectors; i += kAhead * kThreads) {
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
  for (; i < vectors; i += kThreads) {
    add(Pack<T, kVector>::load(x + i * kVector), Pack<T, kVector>::load(g + i * kVector));
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
  extern __shared__ float2 shared_sums[];  // [lanes][columns * kVector]
  int64_t const sample = blockIdx.x / row_blocks;
  int64_t const row_block = blockIdx.x % row_blocks;
  int const lane = threadIdx.x / map.columns;
  int const column = threadIdx.x % map.columns;
  int const first = (int(blockIdx.y) * map.columns + column) * kVector;
  float2 sums[kVector] = {};
  if (lane < map.lanes && first < affine.channels) {
    Channel channels[kVector];
#pragma unroll
    for (int v = 0; v < kVector; ++v) channels[v] = Channel::of(affine, sample, first + v);
    int64_t const end = min(pixels, (row_block + 1) * block_rows);
    int64_t const base = sample * pixels * affine.channels + first;
#pragma unroll 2
    for (int64_t row = row_block * block_rows + lane; row < end; row += map.lanes) {
      auto const px = Pack<T, kVector>::load(input + base + row * affine.channels);
      auto const pg = Pack<T, kVector>::load(grad + base + row * affine.channels);
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        Point const point = point_of<kActivate>(
            device::to_float(px.values[v]), device::to_float(pg.values[v]), channels[v], affine);
        sums[v].x += point.gradient;
        sums[v].y = fmaf(point.gradient, point.normalized, sums[v].y);
      }
    }
  }
  int const width = map.columns * kVector;
  if (lane < map.lanes) {
#pragma unroll
    for (int v = 0; v < kVector; ++v) shared_sums[lane * width + column * kVector + v] = sums[v];
  }
  for (int count = map.lanes; count > 1;) {
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

// One block per (sample, group): channel sums [sample, channel] and the group's terms. Partials of
// a channel are `count` apart by `stride`.
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
      float const weight =
          affine.weight ? device::load_as_float(affine.weight, channel, affine.dtype) : 1.0f;
      weighted.x = fmaf(weight, total.x, weighted.x);
      weighted.y = fmaf(weight, total.y, weighted.y);
    }
  }
  weighted = block_sum(weighted);
  if (threadIdx.x == 0) terms[blockIdx.x] = {weighted.x / elements, weighted.y / elements};
}

// One warp per channel.
__global__ void __launch_bounds__(kThreads)
    affine_gradients(float2 const* __restrict__ sums, int64_t batch, int channels,
                     float* __restrict__ grad_weight, float* __restrict__ grad_bias) {
  int const channel = int((blockIdx.x * kThreads + threadIdx.x) / 32);
  if (channel >= channels) return;
  float2 total{};
  for (int64_t n = threadIdx.x % 32; n < batch; n += 32) {
    total.x += sums[n * channels + channel].x;
    total.y += sums[n * channels + channel].y;
  }
  total = warp_sum(total);
  if (threadIdx.x % 32 == 0) {
    if (grad_weight != nullptr) grad_weight[channel] = total.y;
    if (grad_bias != nullptr) grad_bias[channel] = total.x;
  }
}

// ---- gradient of the input ----------------------------------------------------------------------

template <class T, int kVector, bool kActivate>
__global__ void __launch_bounds__(kThreads)
    grad_of_planes(T const* __restrict__ input, T const* __restrict__ grad, T* __restrict__ output,
                   GradientAffine affine, GroupTerms const* __restrict__ terms, int64_t pixels,
                   int64_t split_size, int splits) {
  int const plane = int(blockIdx.x / unsigned(splits));
  int const sample = plane / affine.channels;
  int const index = plane % affine.channels;
  int64_t const begin = int64_t(blockIdx.x % unsigned(splits)) * split_size;
  int64_t const vectors = (min(split_size, pixels - begin)) / kVector;
  auto const channel = Channel::of(affine, sample, index);
  GroupTerms const group = terms[sample * affine.groups + index / affine.channels_per_group];
  int64_t const base = int64_t(plane) * pixels + begin;
  auto const put = [&](int64_t i, Pack<T, kVector> const& px, Pack<T, kVector> const& pg) {
    Pack<T, kVector> result;
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      result.values[v] = device::from_float<T>(grad_input_of<kActivate>(
          device::to_float(px.values[v]), device::to_float(pg.values[v]), channel, group, affine));
    }
    result.store(output + base + i * kVector);
  };
  constexpr int kAhead = 2;
  int64_t i = threadIdx.x;
  for (; i + (kAhead - 1) * kThreads < vectors; i += kAhead * kThreads) {
    Pack<T, kVector> px[kAhead];
    Pack<T, kVector> pg[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      px[j] = Pack<T, kVector>::load(input + base + (i + j * kThreads) * kVector);
      pg[j] = Pack<T, kVector>::load(grad + base + (i + j * kThreads) * kVector);
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) put(i + j * kThreads, px[j], pg[j]);
  }
  for (; i < vectors; i += kThreads) {
    put(i, Pack<T, kVector>::load(input + base + i * kVector),
        Pack<T, kVector>::load(grad + base + i * kVector));
  }
}

template <class T, int kVector, bool kActivate>
__global__ void __launch_bounds__(kThreads)
    grad_of_rows(T const* __restrict__ input, T const* __restrict__ grad, T* __restrict__ output,
                 GradientAffine affine, GroupTerms const* __restrict__ terms, int64_t pixels,
                 int64_t block_rows, int row_blocks, RowMap map) {
  int64_t const sample = blockIdx.x / row_blocks;
  int64_t const row_block = blockIdx.x % row_blocks;
  int const lane = threadIdx.x / map.columns;
  int const first = int(blockIdx.y * map.columns + threadIdx.x % map.columns) * kVector;
  if (lane >= map.lanes || first >= affine.channels) return;
  Channel channels[kVector];
  GroupTerms groups[kVector];
#pragma unroll
  for (int v = 0; v < kVector; ++v) {
    channels[v] = Channel::of(affine, sample, first + v);
    groups[v] = terms[sample * affine.groups + (first + v) / affine.channels_per_group];
  }
  int64_t const end = min(pixels, (row_block + 1) * block_rows);
  int64_t const base = sample * pixels * affine.channels + first;
#pragma unroll 2
  for (int64_t row = row_block * block_rows + lane; row < end; row += map.lanes) {
    auto const px = Pack<T, kVector>::load(input + base + row * affine.channels);
    auto const pg = Pack<T, kVector>::load(grad + base + row * affine.channels);
    Pack<T, kVector> result;
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      result.values[v] = device::from_float<T>(
          grad_input_of<kActivate>(device::to_float(px.values[v]), device::to_float(pg.values[v]),
                                   channels[v], groups[v], affine));
    }
    result.store(output + base + row * affine.channels);
  }
}

// ---- launches -----------------------------------------------------------------------------------

Split split_of(GroupNormProblem const& p) {
  int64_t const bytes = size_of(p.dtype);
  if (p.layout == Layout::kChannelsFirst) return split_run(p.pixels, bytes, 16 / bytes);
  return split_run(p.pixels, p.channels * bytes, 1);
}

int64_t partial_count(GroupNormProblem const& p) {
  return p.batch * p.channels * int64_t(split_of(p).count);
}

void launch_merge(GroupNormProblem const& p, GradientTensors const& tensors,
                  GradientAffine const& affine, float2 const* partials, int count, float2* sums,
                  GroupTerms* terms, cudaStream_t stream) {
  bool const last = p.layout == Layout::kChannelsLast;
  merge_sums<<<device::checked_grid("merge_sums", p.batch * p.groups), kThreads, 0, stream>>>(
      partials, affine, count, last, float(p.group_size()), sums, terms);
  FUSEDCONV_CUDA("groupnorm gradients: merge_sums", cudaGetLastError());
  if (tensors.grad_weight == nullptr && tensors.grad_bias == nullptr) return;
  dim3 const grid = device::checked_grid("affine_gradients", ceil_div(p.channels * 32, kThreads));
  affine_gradients<<<grid, kThreads, 0, stream>>>(sums, p.batch, int(p.channels),
                                                  tensors.grad_weight, tensors.grad_bias);
  FUSEDCONV_CUDA("groupnorm gradients: affine_gradients", cudaGetLastError());
}

template <class T, bool kActivate>
void launch_gradients(GroupNormProblem const& p, GradientTensors const& tensors,
                      GradientAffine const& affine, float2* partials, float2* sums,
                      GroupTerms* terms, cudaStream_t stream) {
  auto const* x = static_cast<T const*>(tensors.input);
  auto const* g = static_cast<T const*>(tensors.grad_output);
  auto* output = static_cast<T*>(tensors.grad_input);
  Split const split = split_of(p);
  bool const last = p.layout == Layout::kChannelsLast;
  // One vector width for all three tensors: they have the same shape.
  int64_t const extent = last ? p.channels : p.pixels;
  auto const widest = [&](auto&& body) {
    auto const address = reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(g) |
                         reinterpret_cast<uintptr_t>(output);
    device::dispatch_vector<T>(reinterpret_cast<void const*>(address), extent, body);
  };
  widest([&](auto vector) {
    constexpr int kVector = vector.value;
    if (last) {
      RowMap const map = RowMap::of(p.channels, kVector);
      dim3 const grid = device::checked_grid("sums_of_rows", p.batch * split.count, map.slabs);
      int const shared = map.lanes * map.columns * kVector * int(sizeof(float2));
      sums_of_rows<T, kVector, kActivate><<<grid, kThreads, shared, stream>>>(
          x, g, affine, p.pixels, split.size, split.count, map, partials);
    } else {
      dim3 const grid = device::checked_grid("sums_of_planes", p.batch * p.channels * split.count);
      sums_of_planes<T, kVector, kActivate><<<grid, kThreads, 0, stream>>>(
          x, g, affine, p.pixels, split.size, split.count, partials);
    }
  });
  FUSEDCONV_CUDA("groupnorm gradients: sums", cudaGetLastError());
  launch_merge(p, tensors, affine, partials, split.count, sums, terms, stream);
  if (output == nullptr) return;
  widest([&](auto vector) {
    constexpr int kVector = vector.value;
    if (last) {
      RowMap const map = RowMap::of(p.channels, kVector);
      dim3 const grid = device::checked_grid("grad_of_rows", p.batch * split.count, map.slabs);
      grad_of_rows<T, kVector, kActivate><<<grid, kThreads, 0, stream>>>(
          x, g, output, affine, terms, p.pixels, split.size, split.count, map);
    } else {
      dim3 const grid = device::checked_grid("grad_of_planes", p.batch * p.channels * split.count);
      grad_of_planes<T, kVector, kActivate><<<grid, kThreads, 0, stream>>>(
          x, g, output, affine, terms, p.pixels, split.size, split.count);
    }
  });
  FUSEDCONV_CUDA("groupnorm gradients: input", cudaGetLastError());
}

// Streaming pays from here on: below, both passes are served by L2, and a cooperative launch costs
// more.
constexpr int64_t kStreamedBytes = int64_t(32) << 20;

int current_device() {
  int device = 0;
  FUSEDCONV_CUDA("groupnorm gradients", cudaGetDevice(&device));
  return device;
}

StreamPlan streamed_plan(GroupNormProblem const& p, bool aligned) {
  if (p.batch * p.channels * p.pixels * size_of(p.dtype) < kStreamedBytes) {
    StreamPlan plan;
    plan.obstacle = "the tensor is small";
    return plan;
  }
  return plan_streamed_gradients(p, aligned, current_device());
}

bool streams(StreamPlan const& plan) { return plan.obstacle.empty(); }

}  // namespace

int64_t gradient_workspace_bytes(GroupNormProblem const& p) {
  if (p.batch == 0 || p.pixels == 0) return 0;
  int64_t partials = partial_count(p);
  int64_t words = 0;
  if (StreamPlan const plan = streamed_plan(p, true); streams(plan)) {
    partials = std::max(partials, p.batch * p.channels * streamed_sums_per_plane(plan));
    words = plan.words;
  }
  return (partials + p.batch * p.channels + p.batch * p.groups) * int64_t(sizeof(float2)) +
         words * int64_t(sizeof(uint64_t));
}

void gradients(GroupNormProblem const& p, GradientTensors const& tensors, void* workspace,
               cudaStream_t stream) {
  FUSEDCONV_CHECK(p.groups > 0 && p.channels > 0 && p.channels % p.groups == 0, "num_groups is ",
                  p.groups, " for ", p.channels, " channels");
  FUSEDCONV_CHECK(p.batch * p.channels <= 0x7fffffff, "batch x channels is ", p.batch * p.channels);
  if (p.batch == 0 || p.pixels == 0) return;
  bool const aligned = device::is_aligned(tensors.input, 16) &&
                       device::is_aligned(tensors.grad_output, 16) &&
                       device::is_aligned(tensors.grad_input, 16);
  StreamPlan const plan = streamed_plan(p, aligned);
  bool const streamed = streams(plan) && tensors.grad_input != nullptr;
  auto* const sums = static_cast<float2*>(workspace);
  auto* const terms = reinterpret_cast<GroupTerms*>(sums + p.batch * p.channels);
  auto* const words = reinterpret_cast<uint64_t*>(terms + p.batch * p.groups);
  auto* const partials = reinterpret_cast<float2*>(words + (streamed ? plan.words : 0));
  GradientAffine const affine = gradient_affine_of(p, tensors);
  if (streamed) {
    streamed_gradients(plan, p, tensors, partials, words, stream);
    if (tensors.grad_weight != nullptr || tensors.grad_bias != nullptr) {
      launch_merge(p, tensors, affine, partials, int(streamed_sums_per_plane(plan)), sums, terms,
                   stream);
    }
    return;
  }
  bool const activate =
      p.activation_before != Activation::kIdentity || p.activation_after != Activation::kIdentity;
  device::dispatch_type(p.dtype, [&](auto zero) {
    device::dispatch_bool(activate, [&](auto active) {
      launch_gradients<decltype(zero), active.value>(p, tensors, affine, partials, sums, terms,
                                                     stream);
    });
  });
}

}  // namespace fusedconv::groupnorm
