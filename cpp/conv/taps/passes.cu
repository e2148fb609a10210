#include "conv/taps/passes.hpp"

#include <algorithm>

#include "cuda/math.hpp"
#include "cuda/tile.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::taps {
namespace {

constexpr int kPassThreads = 256;
constexpr int kMaxBlocks = 2048;

struct PackParams {
  FilterSource source;  // its channels are all, K those of a convolution group
  Axis axes[kMaxAxes];
  int channels, channel_blocks, row_groups, blocks_m, groups, chunks, chunk_channels;
  int64_t count;
};

// One thread an element of the packed filter, in its order: [convolution group, block of rows,
// chunk, taps by axis, row group, row, channel].
template <class T, bool kRounds>
__global__ void __launch_bounds__(kPassThreads)
    pack_filter_kernel(PackParams const p, T const* __restrict__ weight, T* __restrict__ filter) {
  int64_t const stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < p.count; i += stride) {
    int64_t rest = i;
    auto const take = [&rest](int extent) {
      int const result = int(rest % extent);
      rest /= extent;
      return result;
    };
    int channel = take(p.chunk_channels);
    int const row = take(kGroupRows);
    int const row_group = take(p.groups);
    int taps[kMaxAxes];
    taps[2] = take(max(1, p.axes[2].taps));
    taps[1] = take(max(1, p.axes[1].taps));
    taps[0] = take(max(1, p.axes[0].taps));
    channel += take(p.chunks) * p.chunk_channels;
    int index = take(p.blocks_m) * p.groups + row_group;
    int const conv_group = int(rest);
    bool present = index < p.row_groups && channel < p.channels;
    int residue[kMaxAxes];
    residue[2] = index % p.axes[2].phases;
    index /= p.axes[2].phases;
    int const k = index % p.channel_blocks * kGroupRows + row;
    index /= p.channel_blocks;
    residue[1] = index % p.axes[1].phases;
    residue[0] = index / p.axes[1].phases;
    int64_t at =
        (int64_t(conv_group) * p.channels + channel) * p.source.stride_c + k * p.source.stride_k;
    present = present && k < p.source.k;
    int64_t const strides[kMaxAxes] = {p.source.stride_t, p.source.stride_r, p.source.stride_s};
#pragma unroll
    for (int a = 0; a < kMaxAxes; ++a) {
      Phase const phase = p.axes[a].phase(residue[a]);
      present = present && taps[a] < phase.taps;
      at += (phase.first_tap + taps[a] * p.axes[a].tap_step) * strides[a];
    }
    T value = present ? weight[at] : T(0.0f);
    if constexpr (kRounds) value = device::round_to_tf32(value);
    filter[i] = value;
  }
}

}  // namespace

void pack_filter(Config const& config, FilterSource const& source, void const* weight, void* filter,
                 cudaStream_t stream) {
  Schedule const& s = config.schedule;
  MathTraits const& math = config.traits();
  PackParams p{};
  p.source = source;
  std::copy(s.axes.begin(), s.axes.end(), p.axes);
  p.channels = config.problem.channels;
  p.channel_blocks = s.channel_blocks;
  p.row_groups = s.row_groups;
  p.blocks_m = s.blocks_m;
  p.groups = config.row->groups;
  p.chunks = s.chunks;
  p.chunk_channels = kChunkBytes / math.element_bytes();
  p.count = s.filter_bytes / math.element_bytes();
  int const blocks = int(std::min<int64_t>(ceil_div(p.count, kPassThreads), kMaxBlocks));
  device::dispatch_type(math.dtype, [&](auto zero) {
    using T = decltype(zero);
    auto const launch = [&](auto rounds) {
      pack_filter_kernel<T, rounds.value><<<blocks, kPassThreads, 0, stream>>>(
          p, static_cast<T const*>(weight), static_cast<T*>(filter));
    };
    if constexpr (sizeof(T) == 4) {
      if (math.parts == 1) return launch(std::true_type{});
    }
    launch(std::false_type{});
  });
  FUSEDCONV_CUDA("taps pack_filter", cudaGetLastError());
}

}  // namespace fusedconv::conv::taps
