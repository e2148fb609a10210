// The weight of a transposed convolution, in the order in which stages consume it.
#include <algorithm>
#include <cstdint>

#include "conv/sm90/passes.hpp"
#include "cuda/math.hpp"
#include "cuda/tile.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90 {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxBlocks = 2048;

struct Params {
  FilterSource source;
  int64_t count;
  int taps_d, taps_h, taps_w;
  // Of a stage; then k-iterations along the filter's rows and the channels.
  int blocks_m, k_blocks, filter_rows, iterations_h, iterations_c;
  int64_t stage_elements;  // of one part
};

// One thread per element of the packed filter, in its order: [tile of output channels, k-iteration,
// part, tap, 64 channels' block, 16-byte half, channel, element], where a k-iteration is a depth
// tap, a number of filter rows and a number of k-blocks, and taps count k-blocks, rows and columns.
// Taps are reversed.
template <class T, int kParts>
__global__ void __launch_bounds__(kThreads)
    pack_filter_kernel(Params const p, T const* __restrict__ weight, T* __restrict__ filter) {
  constexpr int kHalf = 16 / sizeof(T);
  int64_t const stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < p.count; i += stride) {
    int64_t rest = i;
    auto const take = [&rest](int extent) {
      int const result = int(rest % extent);
      rest /= extent;
      return result;
    };
    int const element = take(kHalf);
    int const row = take(kBlockM);
    int const half = take(2);
    int const block_m = take(p.blocks_m);
    int const s = take(p.taps_w);
    int const r = take(p.filter_rows);
    int const k_block = take(p.k_blocks);
    int const iteration_c = take(p.iterations_c);
    int const iteration_h = take(p.iterations_h);
    int const d = take(p.taps_d);
    int const tile_m = int(rest);
    int const c = ((iteration_c * p.k_blocks + k_block) * 2 + half) * kHalf + element;
    int const k = (tile_m * p.blocks_m + block_m) * kBlockM + row;
    T value = T(0.0f);
    if (c < p.source.c && k < p.source.k) {
      value = weight[c * p.source.stride_c + k * p.source.stride_k +
                     (p.taps_d - 1 - d) * p.source.stride_t +
                     (p.taps_h - 1 - (iteration_h * p.filter_rows + r)) * p.source.stride_r +
                     (p.taps_w - 1 - s) * p.source.stride_s];
    }
    T* const target =
        filter + i / p.stage_elements * p.stage_elements * kParts + i % p.stage_elements;
    if constexpr (sizeof(T) == 4) {
      if constexpr (kParts == 2) {
        float const big = device::big_tf32(value);
        target[0] = big;
        target[p.stage_elements] = device::round_to_tf32(value - big);
      } else {
        target[0] = device::round_to_tf32(value);
      }
    } else {
      target[0] = value;
    }
  }
}

}  // namespace

void pack_filter(Config const& config, FilterSource const& source, void const* weight, void* filter,
                 cudaStream_t stream) {
  ConvProblem const& c = config.problem;
  Schedule const& s = config.schedule;
  TileShape const& tile = config.tile();
  int const bytes = tile.parts() * tile.element_bytes();
  Params p{};
  p.source = source;
  p.taps_d = c.t, p.taps_h = c.r, p.taps_w = c.s;
  p.blocks_m = tile.blocks_m();
  p.k_blocks = s.k_blocks_per_stage;
  p.filter_rows = s.filter_rows_per_stage;
  p.iterations_h = c.r / s.filter_rows_per_stage;
  p.iterations_c = s.k_blocks / s.k_blocks_per_stage;
  p.count = s.filter_bytes / bytes;
  p.stage_elements = s.filter_stage_bytes / bytes;
  int const blocks = int(std::min<int64_t>(ceil_div(p.count, kThreads), kMaxBlocks));
  device::dispatch_type(tile.traits().dtype, [&](auto zero) {
    using T = decltype(zero);
    auto const launch = [&](auto parts) {
      pack_filter_kernel<T, parts.value><<<blocks, kThreads, 0, stream>>>(
          p, static_cast<T const*>(weight), static_cast<T*>(filter));
    };
    if constexpr (sizeof(T) == 4) {
      if (tile.parts() == 2) return launch(std::integral_constant<int, 2>{});
    }
    launch(std::integral_constant<int, 1>{});
  });
  FUSEDCONV_CUDA("sm90 pack_filter", cudaGetLastError());
}

}  // namespace fusedconv::conv::sm90
