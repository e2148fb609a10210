#include <algorithm>

#include "conv/taps/sm90/params.hpp"
#include "conv/taps/sm90/passes.hpp"
#include "cuda/launch.hpp"
#include "cuda/math.hpp"
#include "cuda/tile.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::taps::sm90 {
namespace {

constexpr int kPackThreads = 512;
constexpr int kMaxBlocks = 4096;

// One thread for 16 bytes of a row's channels at a tap. Neighbouring threads have the rows and taps
// of the same channels, which are neighbours in a dense weight.
template <class T, bool kRounds, bool kSplits>
__global__ void __launch_bounds__(kPackThreads)
    pack_filter_kernel(__grid_constant__ Params const p,
                       __grid_constant__ FilterSource const source, int row_groups, uint32_t count,
                       T const* __restrict__ weight, unsigned char* __restrict__ filter) {
  constexpr int kVector = 16 / int(sizeof(T));
  constexpr int kParts = kSplits ? 2 : 1;
  uint32_t const stride = gridDim.x * blockDim.x;
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) {
    uint32_t rest = i;
    auto const take = [&rest](int extent) {
      int const result = int(rest % uint32_t(extent));
      rest /= uint32_t(extent);
      return result;
    };
    int const row = take(kInstructionRows);
    int const index = take(p.block_taps);
    int const piece = take(p.pieces);
    int64_t const slots = int64_t(rest) * p.block_taps;  // before those of the block and chunk
    int const chunk = take(p.chunks);
    int block_m, conv_group;
    p.blocks_m(conv_group, block_m, int(rest));
    Stream const stream(p, block_m, row_groups);
    if (index >= stream.total) continue;
    // Which consumer takes the block, as which of its taps.
    int const consumer = stream.consumer_of(p, index);
    int const both = p.shares_rows ? 0 : min(stream.counts[0], stream.counts[1]);
    int tap = index < 2 * both ? index / 2 : index - both;
    int which = 0;
    RowGroup group(p, block_m, consumer, 0, row_groups);
    while (tap >= group.taps(p)) {
      tap -= group.taps(p);
      group = RowGroup(p, block_m, consumer, ++which, row_groups);
    }
    RowPlace const own(p, row);
    int const residue[kMaxAxes] = {group.residue[0], group.residue[1],
                                   group.residue[2] + own.phase};
    int offset = p.offset[group.first_tap(p) + tap];
    int64_t const strides[kMaxAxes] = {source.stride_t, source.stride_r, source.stride_s};
    int const k = group.channel + own.channel;
    bool present = k < p.output_channels;
    int64_t at = k * source.stride_k;
#pragma unroll
    for (int a = kMaxAxes - 1; a >= 0; --a) {
      int const shift = offset % p.box[a] + p.axes[a].lowest;
      offset /= p.box[a];
      Phase const phase = p.axes[a].phase(residue[a]);
      int const behind = phase.shift - shift;
      int const j = behind / p.axes[a].sub_dilation;
      present = present && behind >= 0 && behind % p.axes[a].sub_dilation == 0 && j < phase.taps;
      at += (phase.first_tap + j * p.axes[a].tap_step) * strides[a];
    }
    device::Pack<T, kVector> parts[kParts];
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      int const channel = (chunk * p.pieces + piece) * kVector + c;
      T value = T(0.0f);
      if (present && channel < p.channels) {
        value = weight[at + (int64_t(conv_group) * p.channels + channel) * source.stride_c];
      }
      if constexpr (kRounds) value = device::round_to_tf32(value);
      if constexpr (kSplits) {
        float const big = device::big_tf32(value);
        parts[1].values[c] = value - big;
        value = big;
      }
      parts[0].values[c] = value;
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      int64_t const unit =
          (((slots + index) * kParts + part) * p.pieces + piece) * kInstructionRows + row;
      parts[part].store(reinterpret_cast<T*>(filter + unit * 16));
    }
  }
}

}  // namespace

void pack_filter(Config const& config, FilterSource const& source, void const* weight, void* filter,
                 cudaStream_t stream) {
  MathTraits const& math = config.traits();
  Params const p = Params::of({.config = config});
  int64_t const count = config.schedule.filter_bytes / 16 / math.parts;
  if (count == 0) return;
  int const blocks = int(std::min<int64_t>(ceil_div(count, kPackThreads), kMaxBlocks));
  device::dispatch_type(math.dtype, [&](auto zero) {
    using T = decltype(zero);
    auto const launch = [&](auto rounds, auto splits) {
      device::launch(pack_filter_kernel<T, rounds.value, splits.value>, blocks, kPackThreads, 0,
                     stream, p, source, config.row->shape.row_groups, count,
                     static_cast<T const*>(weight), static_cast<unsigned char*>(filter));
    };
    if constexpr (sizeof(T) == 4) {
      if (math.parts == 2) {
        launch(std::false_type{}, std::true_type{});
      } else {
        launch(std::true_type{}, std::false_type{});
      }
    } else {
      launch(std::false_type{}, std::false_type{});
    }
  });
  FUSEDCONV_CUDA("sm90_taps pack_filter", cudaGetLastError());
}

}  // namespace fusedconv::conv::taps::sm90
