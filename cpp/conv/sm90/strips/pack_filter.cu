#include <cstdint>

#include "conv/sm90/arguments.hpp"
#include "conv/sm90/strips/rows.hpp"
#include "cuda/launch.hpp"

namespace fusedconv::conv::sm90::strips {
namespace {

constexpr int kThreads = 128;  // a warpgroup's, each of which packs what it will keep

// A block for each of kProducts operands of 64 output channels by 16 input channels. A thread's
// words are of rows lane / 4 and 8 behind it, of two channels from lane % 4 * 2 on, and of the same
// rows, 8 channels on.
__global__ void __launch_bounds__(kThreads)
    pack_filter_kernel(__grid_constant__ FilterSource const source, uint16_t const* weight,
                       uint4* filter) {
  int const operand = int(blockIdx.x) % kProducts, block = int(blockIdx.x) / kProducts;
  int const tap = operand / kSteps, step = operand % kSteps;
  int const r = kTaps - 1 - tap / kTaps, s = kTaps - 1 - tap % kTaps;
  int const warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  int64_t const k0 = block * kChannels + warp * kStepChannels + lane / 4;
  int64_t const c0 = step * kStepChannels + lane % 4 * 2;
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    int64_t const k = k0 + i % 2 * 8, c = c0 + i / 2 * 8;
    uint32_t word = 0;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (k >= source.k || c + e >= source.c) continue;
      uint32_t const bits = weight[(c + e) * source.stride_c + k * source.stride_k +
                                   r * source.stride_r + s * source.stride_s];
      word |= bits << 16 * e;
    }
    words[i] = word;
  }
  filter[int64_t(blockIdx.x) * kThreads + threadIdx.x] = {words[0], words[1], words[2], words[3]};
}

}  // namespace

void pack_filter(Config const& config, FilterSource const& source, void const* weight, void* filter,
                 cudaStream_t stream) {
  auto const blocks = unsigned(config.schedule.blocks_n * kProducts);
  check_launch(config, 1, "launch of the pass that packs the filter",
               device::launch(&pack_filter_kernel, blocks, kThreads, 0, stream, source,
                              static_cast<uint16_t const*>(weight), static_cast<uint4*>(filter)));
}

}  // namespace fusedconv::conv::sm90::strips
