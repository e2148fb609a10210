#include "cuda/launch.hpp"
#include "cuda/sum.hpp"
#include "groupnorm/partition.hpp"
#include "ungrouped/device.hpp"
#include "ungrouped/passes.hpp"

namespace fusedconv::ungrouped {
namespace {

using groupnorm::kThreads;

// Of a plane, a block's.
constexpr int64_t kRunBytes = 32 << 10;

groupnorm::Split split_of(GroupNormProblem const& p) {
  int64_t const bytes = size_of(p.dtype);
  return groupnorm::split_run(p.pixels, bytes, 16 / bytes, kRunBytes);
}

// Block (split, plane).
template <class T, int kVector, Kind kKind, Known kKnown>
__global__ void __launch_bounds__(kThreads)
    grad_of_planes(Tensors<T, T> const tensors, int64_t pixels, int64_t split_size, int splits) {
  Affine const& affine = tensors.affine;
  int const split = int(blockIdx.x % unsigned(splits));
  int const plane = int(blockIdx.x / unsigned(splits));
  int const sample = plane / affine.channels, channel = plane % affine.channels;
  int64_t const begin = int64_t(split) * split_size;
  int64_t const vectors = min(split_size, pixels - begin) / kVector;
  int64_t const base = int64_t(plane) * pixels + begin;
  constexpr bool kIdentity = kKind == Kind::kIdentity;
  float2 const entry = kIdentity ? float2{1.0f, 0.0f} : entry_of(affine, channel);
  Sums sums;
  auto const load = [&](T const* source, int64_t i) {
    return Pack<T, kVector>::load(source + base + i * kVector);
  };
  auto const put = [&](int64_t i, Pack<T, kVector> const& px, Pack<T, kVector> const& pg) {
    float values[kVector], grads[kVector];
    as_floats(px, values);
    as_floats(pg, grads);
    if constexpr (kIdentity) {
      pass_activation<kKnown>(affine, values, grads);
      if constexpr (kReads<kKind, kKnown>) {
        auto const stored = as_stored<T>(grads);
        if (tensors.output != nullptr) stored.store(tensors.output + base + i * kVector);
      }
#pragma unroll
      for (float const value : grads) sums.input += value;
      return;
    }
    activate<kKnown>(affine, values);
    pass_after<kKnown>(affine, values, [&](int) { return entry; }, grads);
    float result[kVector];
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      sums.grad += grads[v];
      sums.projection = fmaf(grads[v], values[v], sums.projection);
      result[v] = entry.x * grads[v];
    }
    pass_before<kKnown>(affine, px, result);
    auto const stored = as_stored<T>(result);
#pragma unroll
    for (float const value : result) sums.input += value;
    if (tensors.output != nullptr) stored.store(tensors.output + base + i * kVector);
  };
  constexpr int kAhead = 2;
  int64_t i = threadIdx.x;
  for (; i + (kAhead - 1) * kThreads < vectors; i += kAhead * kThreads) {
    Pack<T, kVector> px[kAhead], pg[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if constexpr (kReads<kKind, kKnown>) px[j] = load(tensors.input, i + j * kThreads);
      pg[j] = load(tensors.grad, i + j * kThreads);
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) put(i + j * kThreads, px[j], pg[j]);
  }
  for (; i < vectors; i += kThreads) {
    Pack<T, kVector> px;
    if constexpr (kReads<kKind, kKnown>) px = load(tensors.input, i);
    put(i, px, load(tensors.grad, i));
  }
  constexpr int kWarps = kThreads / 32;
  __shared__ float of_warps[kMostSums * kWarps];
  for_each_sum<kKind>([&](auto sum) { sums.*sum = device::warp_total(sums.*sum); });
  if (threadIdx.x % 32 == 0) {
    float* own = of_warps + threadIdx.x / 32;
    for_each_sum<kKind>([&](auto sum) {
      *own = sums.*sum;
      own += kWarps;
    });
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    float const* others = of_warps;
    for_each_sum<kKind>([&](auto sum) {
      for (int warp = 1; warp < kWarps; ++warp) sums.*sum += others[warp];
      others += kWarps;
    });
    leave<kKind>(tensors.partials, int64_t(sample) * splits + split, affine.channels, channel,
                 sums);
  }
}

}  // namespace

int64_t parts_of_planes(GroupNormProblem const& p) { return p.batch * split_of(p).count; }

void gradient_of_planes(GradientConfig const& config, GradientTensors const& given,
                        cudaStream_t stream) {
  GroupNormProblem const& p = config.problem;
  groupnorm::Split const split = split_of(p);
  dim3 const grid = device::checked_grid("grad_of_planes", p.batch * p.channels * split.count);
  device::dispatch_type(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    dispatch_known(p, [&](auto known) {
      auto const launch = [&](auto vector) {
        auto const kernel = config.kind == Kind::kIdentity
                                ? grad_of_planes<T, vector.value, Kind::kIdentity, known.value>
                                : grad_of_planes<T, vector.value, Kind::kAffine, known.value>;
        device::launch(kernel, grid, kThreads, 0, stream, tensors_of<T, T>(p, given), p.pixels,
                       split.size, split.count);
      };
      constexpr int kWhole = 16 / int(sizeof(T));
      if (serves(p, given, p.pixels, kWhole)) return launch(std::integral_constant<int, kWhole>{});
      if (serves(p, given, p.pixels, 2)) return launch(std::integral_constant<int, 2>{});
      launch(std::integral_constant<int, 1>{});
    });
  });
  FUSEDCONV_CUDA("grad_of_planes", cudaGetLastError());
}

}  // namespace fusedconv::ungrouped
