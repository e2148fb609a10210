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
template <class T, int kVector, Known kKnown>
__global__ void __launch_bounds__(kThreads)
    grad_of_planes(Tensors<T> const tensors, int64_t pixels, int64_t split_size, int splits) {
  Affine const& affine = tensors.affine;
  int const split = int(blockIdx.x % unsigned(splits));
  int const plane = int(blockIdx.x / unsigned(splits));
  int const sample = plane / affine.channels, channel = plane % affine.channels;
  int64_t const begin = int64_t(split) * split_size;
  int64_t const vectors = min(split_size, pixels - begin) / kVector;
  int64_t const base = int64_t(plane) * pixels + begin;
  float2 const entry = entry_of(affine, channel);
  Sums sums;
  auto const put = [&](int64_t i, Pack<T, kVector> const& px, Pack<T, kVector> const& pg) {
    float values[kVector], grads[kVector];
    as_floats(px, values);
    as_floats(pg, grads);
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
      px[j] = Pack<T, kVector>::load(tensors.input + base + (i + j * kThreads) * kVector);
      pg[j] = Pack<T, kVector>::load(tensors.grad + base + (i + j * kThreads) * kVector);
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) put(i + j * kThreads, px[j], pg[j]);
  }
  for (; i < vectors; i += kThreads) {
    put(i, Pack<T, kVector>::load(tensors.input + base + i * kVector),
        Pack<T, kVector>::load(tensors.grad + base + i * kVector));
  }
  __shared__ float of_warps[kSums][kThreads / 32];
  sums = {device::warp_total(sums.grad), device::warp_total(sums.projection),
          device::warp_total(sums.input)};
  if (threadIdx.x % 32 == 0) {
    of_warps[0][threadIdx.x / 32] = sums.grad;
    of_warps[1][threadIdx.x / 32] = sums.projection;
    of_warps[2][threadIdx.x / 32] = sums.input;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < kThreads / 32; ++warp) {
      sums.grad += of_warps[0][warp];
      sums.projection += of_warps[1][warp];
      sums.input += of_warps[2][warp];
    }
    leave(tensors.partials, int64_t(sample) * splits + split, affine.channels, channel, sums);
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
        grad_of_planes<T, vector.value, known.value><<<grid, kThreads, 0, stream>>>(
            tensors_of<T>(p, given), p.pixels, split.size, split.count);
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
