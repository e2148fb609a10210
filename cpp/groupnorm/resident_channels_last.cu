#include "cuda/launch.hpp"
#include "cuda/math.hpp"
#include "cuda/tile.hpp"
#include "fusedconv/check.hpp"
#include "groupnorm/affine.hpp"
#include "groupnorm/launch.hpp"
#include "groupnorm/resident.hpp"
#include "groupnorm/resident_device.hpp"

namespace fusedconv::groupnorm {
namespace {

using device::Moments;
using device::Pack;

// A group's kThreads threads
// 1. load it whole into registers: `columns` vectors of each pixel,
// 2. take its moments, merged over the warp and then the block,
// 3. make scale and shift of the channels' weight and bias, in shared memory,
// 4. normalise and store.
template <class T, int kThreads, bool kActivate>
__global__ void __launch_bounds__(resident_block(kThreads),
                                  kResidentThreads / resident_block(kThreads))
    block_per_group_channels_last(T const* __restrict__ input, T* __restrict__ output,
                                  Affine affine, StatisticsTargets saved, unsigned units,
                                  unsigned pixels, unsigned columns, float eps) {
  constexpr int kVector = 16 / sizeof(T);
  constexpr int kBlock = resident_block(kThreads);
  constexpr int kGroups = kBlock / kThreads;
  __shared__ Moments shared[kBlock / 32];
  extern __shared__ TableEntry table[];  // [kGroups][channels_per_group]
  unsigned const unit = blockIdx.x * kGroups + threadIdx.x / kThreads;
  int const thread = threadIdx.x % kThreads;
  // The last block may hold fewer groups; its threads without one still meet the barriers.
  bool const active = unit < units;
  int const vectors = active ? int(pixels * columns) : 0;
  int const count = thread < vectors ? (vectors - thread + kThreads - 1) / kThreads : 0;
  int const first_channel = int(unit % unsigned(affine.groups)) * affine.channels_per_group;
  int64_t const base =
      int64_t(unit / unsigned(affine.groups)) * pixels * affine.channels + first_channel;
  auto const offset = [&](unsigned index) {
    unsigned const pixel = index / columns;
    return pixel * unsigned(affine.channels) + (index - pixel * columns) * kVector;
  };

  Pack<T, kVector> packs[kThreadPacks];
#pragma unroll
  for (int k = 0; k < kThreadPacks; ++k) {
    if (k < count) packs[k] = Pack<T, kVector>::load(input + base + offset(thread + k * kThreads));
  }
  TableEntry* const channels = table + threadIdx.x / kThreads * affine.channels_per_group;
  for (int c = thread; active && c < affine.channels_per_group; c += kThreads) {
    int const channel = first_channel + c;
    channels[c] = make_float2(weight_of(affine, channel), bias_of(affine, channel));
  }
  auto const total = device_resident::merge_group<kThreads>(
      device_resident::moments_of_packs<T, kVector, kThreadPacks, kActivate>(packs, count,
                                                                             affine.front()),
      shared);
  Statistics const group = device::statistics_of(total, eps);
  if (active && thread == 0) device::store(saved, unit, group);
  for (int c = thread; active && c < affine.channels_per_group; c += kThreads) {
    auto const channel = ChannelAffine::of(group, channels[c].x, channels[c].y);
    channels[c] = make_float2(channel.scale, channel.shift);
  }
  if constexpr (kThreads == 32) {
    __syncwarp();
  } else {
    __syncthreads();
  }
#pragma unroll
  for (int k = 0; k < kThreadPacks; ++k) {
    if (k < count) {
      packs[k].forget();
      unsigned const index = thread + k * kThreads;
      TableEntry const* const entries = channels + index % columns * kVector;
      auto const channel = [&](int v) {
        return ChannelAffine{group.mean, entries[v].x, entries[v].y};
      };
      normalized_pack<T, kActivate>(packs[k], channel, affine).store(output + base + offset(index));
    }
  }
}

}  // namespace

void normalize_resident_channels_last(ResidentConfig const& config, GroupNormProblem const& p,
                                      GroupNormTensors const& tensors, cudaStream_t stream) {
  int64_t const units = p.batch * p.groups;
  dispatch_kernel(p, [&](auto zero, auto active) {
    using T = decltype(zero);
    dispatch_group_threads(config, [&](auto threads) {
      constexpr int kThreads = threads.value;
      constexpr int kGroups = resident_block(kThreads) / kThreads;
      dim3 const grid =
          device::checked_grid("block_per_group_channels_last", ceil_div(units, kGroups));
      device::launch(
          block_per_group_channels_last<T, kThreads, active.value>, grid, resident_block(kThreads),
          table_bytes(p, kThreads), stream, static_cast<T const*>(tensors.input),
          static_cast<T*>(tensors.output), affine_of(p, tensors.weight, tensors.bias, nullptr),
          StatisticsTargets{.mean = tensors.mean, .rstd = tensors.rstd}, unsigned(units),
          unsigned(p.pixels), unsigned(p.channels_per_group() / config.vector), float(p.eps));
    });
  });
  FUSEDCONV_CUDA("block_per_group_channels_last", cudaGetLastError());
}

}  // namespace fusedconv::groupnorm
