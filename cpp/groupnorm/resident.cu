#include "groupnorm/resident.hpp"

#include <algorithm>

#include "cuda/math.hpp"
#include "cuda/tile.hpp"
#include "fusedconv/check.hpp"
#include "groupnorm/affine.hpp"
#include "groupnorm/moments.hpp"
#include "groupnorm/resident_device.hpp"

namespace fusedconv::groupnorm {
namespace {

using device::Moments;
using device::Pack;

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
__global__ void __launch_bounds__(resident_block(kThreads),
                                  kResidentThreads / resident_block(kThreads))
    block_per_group(T const* __restrict__ input, T* __restrict__ output, Affine affine,
                    StatisticsTargets saved, unsigned units, int vectors,
                    unsigned vectors_per_plane, float eps) {
  constexpr int kBlock = resident_block(kThreads);
  static_assert(kBlock % kThreads == 0 && kThreads % 32 == 0, "whole warps per group");
  __shared__ device::RelativeMoments shared[kBlock / 32];
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
  float const reference =
      active ? before<kActivate>(affine.activation_before, device::to_float(input[base * kVector]))
             : 0.0f;
  auto const total = device_resident::merge_group<kThreads>(
      device_resident::moments_of_packs<T, kVector, kChunks, kActivate>(packs, count,
                                                                        affine.activation_before)
          .about(reference),
      shared);
  Statistics const group = device::statistics_of(Moments::of(reference, total), eps);
  if (active && thread == 0) device::store(saved, unit, group);
  int const first_channel = int(unit % unsigned(affine.groups)) * affine.channels_per_group;
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    if (k < count) {
      packs[k].forget();
      int const index = thread + k * kThreads;
      auto const channel = ChannelAffine::of(
          affine, group, first_channel + int(unsigned(index) / vectors_per_plane));
      normalized_pack<T, kVector, kActivate>(packs[k], channel, affine)
          .store(output + (base + index) * kVector);
    }
  }
}

// ---- launches ----------------------------------------------------------------------------------

template <class T, int kVector, bool kActivate>
void launch_block(ResidentPlan const& plan, Passes const& passes, GroupNormTensors const& tensors,
                  cudaStream_t stream) {
  GroupNormProblem const& p = passes.problem;
  auto const launch = [&](auto threads) {
    constexpr int kThreads = threads.value;
    constexpr int kBlock = resident_block(kThreads);
    dim3 const grid =
        device::checked_grid("block_per_group", ceil_div(plan.units, kBlock / kThreads));
    block_per_group<T, kVector, kThreads, kGroupChunks, kActivate><<<grid, kBlock, 0, stream>>>(
        static_cast<T const*>(tensors.input), static_cast<T*>(tensors.output),
        affine_of(p, tensors.weight, tensors.bias, nullptr),
        StatisticsTargets{.mean = tensors.mean, .rstd = tensors.rstd}, unsigned(plan.units),
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

constexpr int64_t kMaxTableBytes = 40 << 10;  // of a channels-last block's weights and biases

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
  if (p.layout == Layout::kChannelsFirst) {
    plan.vector = aligned && p.pixels % full == 0 ? full : 1;
  } else {
    if (!aligned) return refused("an address is not a multiple of 16 bytes");
    if (p.channels_per_group() % full != 0) {
      return refused(detail::join(p.channels_per_group(),
                                  " channels of a group are not whole 16-byte vectors"));
    }
    if (p.channels * p.pixels >= int64_t(1) << 31) return refused("a sample has 2^31 elements");
    plan.vector = full;
  }
  int64_t const vectors = p.group_size() / plan.vector;
  for (int const threads : kGroupThreads) {
    if (vectors <= int64_t(threads) * kGroupChunks) {
      int64_t const table = resident_block(threads) / threads * p.channels_per_group() * 8;
      if (p.layout == Layout::kChannelsLast && table > kMaxTableBytes) continue;
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
  if (p.layout == Layout::kChannelsLast) {
    return normalize_resident_channels_last(plan, passes, tensors, stream);
  }
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
