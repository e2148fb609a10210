#include "groupnorm/resident.hpp"

#include <string>
#include <utility>

#include "cuda/launch.hpp"
#include "cuda/math.hpp"
#include "cuda/tile.hpp"
#include "fusedconv/check.hpp"
#include "groupnorm/affine.hpp"
#include "groupnorm/launch.hpp"
#include "groupnorm/moments.hpp"
#include "groupnorm/resident_device.hpp"
#include "groupnorm/support.hpp"

namespace fusedconv::groupnorm {
namespace {

using device::Moments;
using device::Pack;

// Channels first. A group's kThreads threads
// 1. load it whole into registers,
// 2. take its moments, merged over the warp and then the block,
// 3. normalise and store.
template <class T, int kVector, int kThreads, int kPacks, bool kActivate>
__global__ void __launch_bounds__(resident_block(kThreads),
                                  kResidentThreads / resident_block(kThreads))
    block_per_group(T const* __restrict__ input, T* __restrict__ output, Affine affine,
                    StatisticsTargets saved, unsigned units, int vectors,
                    unsigned vectors_per_plane, float eps) {
  constexpr int kBlock = resident_block(kThreads);
  static_assert(kBlock % kThreads == 0 && kThreads % 32 == 0, "whole warps per group");
  __shared__ Moments shared[kBlock / 32];
  unsigned const unit = blockIdx.x * (kBlock / kThreads) + threadIdx.x / kThreads;
  int const thread = threadIdx.x % kThreads;
  // The last block may hold fewer groups; its threads without one still meet the barriers.
  bool const active = unit < units;
  int const count = active && thread < vectors ? (vectors - thread + kThreads - 1) / kThreads : 0;
  int64_t const base = int64_t(unit) * vectors;

  Pack<T, kVector> packs[kPacks];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    if (k < count)
      packs[k] = Pack<T, kVector>::load(input + (base + thread + k * kThreads) * kVector);
  }
  auto const total = device_resident::merge_group<kThreads>(
      device_resident::moments_of_packs<T, kVector, kPacks, kActivate>(packs, count,
                                                                       affine.front()),
      shared);
  Statistics const group = device::statistics_of(total, eps);
  if (active && thread == 0) device::store(saved, unit, group);
  int const first_channel = int(unit % unsigned(affine.groups)) * affine.channels_per_group;
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    if (k < count) {
      packs[k].forget();
      int const index = thread + k * kThreads;
      auto const channel = ChannelAffine::of(
          affine, group, first_channel + int(unsigned(index) / vectors_per_plane));
      normalized_pack<T, kActivate>(packs[k], channel, affine)
          .store(output + (base + index) * kVector);
    }
  }
}

// ---- launches ----

template <class T, int kVector, bool kActivate>
void launch_block(ResidentConfig const& config, GroupNormProblem const& p,
                  GroupNormTensors const& tensors, cudaStream_t stream) {
  int64_t const units = p.batch * p.groups;
  dispatch_group_threads(config, [&](auto threads) {
    constexpr int kThreads = threads.value;
    constexpr int kBlock = resident_block(kThreads);
    dim3 const grid = device::checked_grid("block_per_group", ceil_div(units, kBlock / kThreads));
    device::launch(block_per_group<T, kVector, kThreads, kThreadPacks, kActivate>, grid, kBlock, 0,
                   stream, static_cast<T const*>(tensors.input), static_cast<T*>(tensors.output),
                   affine_of(p, tensors.weight, tensors.bias, nullptr),
                   StatisticsTargets{.mean = tensors.mean, .rstd = tensors.rstd}, unsigned(units),
                   int(p.group_size() / kVector), unsigned(p.pixels / kVector), float(p.eps));
  });
  FUSEDCONV_CUDA("block_per_group", cudaGetLastError());
}

constexpr int64_t kMaxTableBytes = 40 << 10;  // of a channels-last block's weights and biases

}  // namespace

ResidentConfig resident_config(GroupNormProblem const& p, bool aligned) {
  ResidentConfig config;
  auto const refused = [&](std::string reason) {
    config.support = Support::no(std::move(reason));
    return config;
  };
  check(p);
  config.support = supports_same_form(p);
  if (!config.support) return config;
  int const full = int(16 / size_of(p.dtype));
  int64_t const units = p.batch * p.groups;
  if (units < 1 || units > 0x7fffffff) {
    return refused(detail::join("there are ", units, " groups"));
  }
  if (p.input_layout == Layout::kChannelsFirst) {
    config.vector = aligned && p.pixels % full == 0 ? full : 1;
  } else {
    if (!aligned) return refused("an address is not a multiple of 16 bytes");
    if (p.channels_per_group() % full != 0) {
      return refused(detail::join(p.channels_per_group(),
                                  " channels of a group are not whole 16-byte vectors"));
    }
    if (p.channels * p.pixels >= int64_t(1) << 31) return refused("a sample has 2^31 elements");
    config.vector = full;
  }
  int64_t const vectors = p.group_size() / config.vector;
  for (int const threads : kGroupThreads) {
    if (vectors > int64_t(threads) * kThreadPacks) continue;
    if (p.input_layout == Layout::kChannelsLast && table_bytes(p, threads) > kMaxTableBytes) {
      continue;
    }
    config.threads = threads;
    return config;
  }
  return refused(detail::join("a group of ", vectors, " accesses of ", config.vector,
                              " elements does not fit the registers of a block"));
}

void normalize_resident(ResidentConfig const& config, GroupNormProblem const& p,
                        GroupNormTensors const& tensors, cudaStream_t stream) {
  FUSEDCONV_CHECK(config.vector == 1 || (device::is_aligned(tensors.input, 16) &&
                                         device::is_aligned(tensors.output, 16)),
                  "normalize_resident: input or output is not aligned to 16 bytes");
  if (p.input_layout == Layout::kChannelsLast) {
    return normalize_resident_channels_last(config, p, tensors, stream);
  }
  dispatch_kernel(p, [&](auto zero, auto active) {
    using T = decltype(zero);
    if (config.vector == 1) return launch_block<T, 1, active.value>(config, p, tensors, stream);
    launch_block<T, 16 / int(sizeof(T)), active.value>(config, p, tensors, stream);
  });
}

}  // namespace fusedconv::groupnorm
