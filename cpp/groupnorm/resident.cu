#include "groupnorm/resident.hpp"

#include <algorithm>

#include "cuda/math.hpp"
#include "cuda/tile.hpp"
#include "fusedconv/check.hpp"
#include "groupnorm/affine.hpp"
#include "groupnorm/moments.hpp"

namespace fusedconv::groupnorm {
namespace {

using device::Moments;
using device::Pack;

// Moments of the first `count` packs, all activated.
template <class T, int kVector, int kChunks, bool kActivate>
__device__ __forceinline__ Moments moments_of_packs(Pack<T, kVector> const (&packs)[kChunks],
                                                    int count, Activation activation) {
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    if (k < count) {
      float part = 0.0f;
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        part += before<kActivate>(activation, device::to_float(packs[k].values[v]));
      }
      sum += part;
    }
  }
  Moments result;
  result.count = float(count * kVector);
  result.mean = count > 0 ? sum / result.count : 0.0f;
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    if (k < count) {
      float part = 0.0f;
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        float const deviation =
            before<kActivate>(activation, device::to_float(packs[k].values[v])) - result.mean;
        part = fmaf(deviation, deviation, part);
      }
      result.m2 += part;
    }
  }
  return result;
}

__device__ __forceinline__ Moments merge_warp(Moments value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value.merge(value.shuffled_down(offset));
  return value;
}

struct Statistics {
  float mean;
  float rstd;
};

__device__ __forceinline__ Statistics statistics_of(Moments const& total, float eps) {
  return {total.mean, device::reciprocal_deviation(total, eps)};
}

// Scale and shift of one channel, given its group's statistics.
__device__ __forceinline__ ChannelAffine channel_affine(Affine const& affine,
                                                        Statistics const& group, int channel) {
  ChannelAffine result{group.mean, group.rstd, 0.0f};
  if (affine.weight != nullptr) {
    result.scale *= device::load_as_float(affine.weight, channel, affine.dtype);
  }
  if (affine.bias != nullptr) {
    result.shift = device::load_as_float(affine.bias, channel, affine.dtype);
  }
  return result;
}

template <class T, int kVector, bool kActivate>
__device__ __forceinline__ Pack<T, kVector> normalized_pack(Pack<T, kVector> const& pack,
                                                            ChannelAffine const& channel,
                                                            Affine const& affine) {
  Pack<T, kVector> result;
#pragma unroll
  for (int v = 0; v < kVector; ++v) {
    result.values[v] = device::from_float<T>(
        normalized<kActivate>(device::to_float(pack.values[v]), channel, affine));
  }
  return result;
}

// Channels first. A group's kThreads threads
// 1. load it whole into registers,
// 2. take its moments, merged over the warp and then the block,
// 3. normalise and store.
template <class T, int kVector, int kThreads, int kChunks, bool kActivate>
__global__ void __launch_bounds__(kThreads < 256 ? 256 : kThreads)
    block_per_group(T const* __restrict__ input, T* __restrict__ output, Affine affine,
                    float* __restrict__ mean, float* __restrict__ rstd, unsigned units, int vectors,
                    unsigned vectors_per_plane, float eps) {
  constexpr int kBlock = kThreads < 256 ? 256 : kThreads;
  constexpr int kWarps = kThreads / 32;
  static_assert(kBlock % kThreads == 0 && kThreads % 32 == 0, "whole warps per group");
  __shared__ Moments shared[kBlock / 32];
  unsigned const unit = blockIdx.x * (kBlock / kThreads) + threadIdx.x / kThreads;
  int const thread = threadIdx.x % kThreads;
  // The last block may hold fewer groups; its threads without one still meet the barriers.
  bool const active = unit < units;
  int const count = active && thread < vectors ? (vectors - thread + kThreads - 1) / kThreads : 0;
  int64_t const base = int64_t(unit) * vectors;

  Pack<T, kVector> packs[kChunks];
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    if (k < count)
      packs[k] = Pack<T, kVector>::load(input + (base + thread + k * kThreads) * kVector);
  }
  Moments total = merge_warp(
      moments_of_packs<T, kVector, kChunks, kActivate>(packs, count, affine.activation_before));
  if constexpr (kWarps > 1) {
    int const warp = threadIdx.x / 32;
    int const first_warp = warp / kWarps * kWarps;
    if (threadIdx.x % 32 == 0) shared[warp] = total;
    __syncthreads();
    // Every warp merges the group's partial moments in the same order.
    total = threadIdx.x % 32 < kWarps ? shared[first_warp + threadIdx.x % 32] : Moments{};
    total = merge_warp(total);
  }
  total = {__shfl_sync(~0u, total.count, 0), __shfl_sync(~0u, total.mean, 0),
           __shfl_sync(~0u, total.m2, 0)};
  Statistics const group = statistics_of(total, eps);
  if (active && thread == 0 && mean != nullptr) {
    mean[unit] = group.mean;
    rstd[unit] = group.rstd;
  }
  int const first_channel = int(unit % unsigned(affine.groups)) * affine.channels_per_group;
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    if (k < count) {
      int const index = thread + k * kThreads;
      auto const channel =
          channel_affine(affine, group, first_channel + int(unsigned(index) / vectors_per_plane));
      normalized_pack<T, kVector, kActivate>(packs[k], channel, affine)
          .store(output + (base + index) * kVector);
    }
  }
}

// ---- launches ----------------------------------------------------------------------------------

// The smallest number of threads whose registers hold a group.
constexpr int kBlockThreads[] = {32, 128, 512};
constexpr int kBlockChunks = 8;

template <class T, int kVector, bool kActivate>
void launch_block(ResidentPlan const& plan, Passes const& passes, GroupNormTensors const& tensors,
                  cudaStream_t stream) {
  GroupNormProblem const& p = passes.problem;
  auto const launch = [&](auto threads) {
    constexpr int kThreads = threads.value;
    constexpr int kBlock = kThreads < 256 ? 256 : kThreads;
    dim3 const grid =
        device::checked_grid("block_per_group", ceil_div(plan.units, kBlock / kThreads));
    block_per_group<T, kVector, kThreads, kBlockChunks, kActivate><<<grid, kBlock, 0, stream>>>(
        static_cast<T const*>(tensors.input), static_cast<T*>(tensors.output),
        affine_of(p, tensors), tensors.mean, tensors.rstd, unsigned(plan.units),
        int(p.group_size() / kVector), unsigned(p.pixels / kVector), float(p.eps));
  };
  switch (plan.threads) {
    case 32: launch(std::integral_constant<int, 32>{}); break;
    case 128: launch(std::integral_constant<int, 128>{}); break;
    case 512: launch(std::integral_constant<int, 512>{}); break;
    default: throw InvalidArgument(detail::join("block_per_group: threads is ", plan.threads));
  }
  FUSEDCONV_CUDA("block_per_group", cudaGetLastError());
}

ResidentPlan refused(std::string reason) {
  ResidentPlan plan;
  plan.obstacle = std::move(reason);
  return plan;
}

}  // namespace

ResidentPlan plan_resident(Passes const& passes, int64_t batch, bool aligned) {
  GroupNormProblem const& p = passes.problem;
  int const full = int(16 / size_of(p.dtype));
  if (passes.output_dtype != p.dtype) return refused("output and input dtype differ");
  if (passes.output_layout != p.layout) return refused("output and input layout differ");
  if (passes.row_channels != p.channels) return refused("rows of channels are padded");
  ResidentPlan plan;
  plan.units = batch * p.groups;
  if (plan.units < 1 || plan.units > 0x7fffffff) {
    return refused(detail::join("there are ", plan.units, " groups"));
  }
  if (p.layout != Layout::kChannelsFirst) return refused("a group is not one run in memory");
  plan.vector = aligned && p.pixels % full == 0 ? full : 1;
  int64_t const vectors = p.group_size() / plan.vector;
  for (int const threads : kBlockThreads) {
    if (vectors <= int64_t(threads) * kBlockChunks) {
      plan.threads = threads;
      return plan;
    }
  }
  return refused(detail::join("a group of ", vectors, " accesses of ", plan.vector,
                              " elements does not fit the registers of a block"));
}

void normalize_resident(ResidentPlan const& plan, Passes const& passes,
                        GroupNormTensors const& tensors, cudaStream_t stream) {
  GroupNormProblem const& p = passes.problem;
  FUSEDCONV_CHECK(plan.threads > 0, "normalize_resident: ", plan.obstacle);
  FUSEDCONV_CHECK(plan.vector == 1 || (device::is_aligned(tensors.input, 16) &&
                                       device::is_aligned(tensors.output, 16)),
                  "normalize_resident: input or output is not aligned to 16 bytes");
  bool const activate =
      p.activation_before != Activation::kIdentity || p.activation_after != Activation::kIdentity;
  device::dispatch_type(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    device::dispatch_bool(activate, [&](auto active) {
      if (plan.vector == 1) return launch_block<T, 1, active.value>(plan, passes, tensors, stream);
      launch_block<T, 16 / int(sizeof(T)), active.value>(plan, passes, tensors, stream);
    });
  });
}

}  // namespace fusedconv::groupnorm
