#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "conv/failure.hpp"
#include "conv/sm90/lines/params.hpp"
#include "conv/sm90/lines/rows.hpp"
#include "cuda/early.hpp"
#include "cuda/launch.hpp"
#include "cutlass/fast_math.h"

namespace fusedconv::conv::sm90::lines {
namespace {

constexpr int kThreads = 128;
constexpr int kVector = 8;

struct Order {
  FilterSource source;
  int stride, rotation, vectors;  // vectors: of a row's channels
  cutlass::FastDivmod by_row;
};

// Threads beside each other have rows beside each other, whose taps lie beside each other.
__global__ void __launch_bounds__(kThreads)
    pack_filter_kernel(__grid_constant__ Order const order, uint16_t const* weight, uint4* filter) {
  device::release_early();
  int const i = int(blockIdx.x) * kThreads + int(threadIdx.x);
  int vector, row;
  order.by_row(vector, row, i);
  if (vector >= order.vectors) return;
  FilterSource const& f = order.source;
  int const block = row / (kTaps * kRows), tap = row / kRows % kTaps, own = row % kRows;
  int const warp_channels = 16 / order.stride;
  RowPlace const at(own % 16, order.stride);
  int const channel = (block * (kRows / 16) + own / 16) * warp_channels + at.channel;
  int const s = (at.phase + order.rotation) % order.stride + tap * order.stride;
  uint16_t values[kVector] = {};
  if (channel < f.k && s < f.s) {
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      int const c = vector * kVector + v;
      if (c < f.c) values[v] = weight[c * f.stride_c + channel * f.stride_k + s * f.stride_s];
    }
  }
  filter[int64_t(row) * order.vectors + vector] = *reinterpret_cast<uint4*>(values);
}

}  // namespace

void pack_filter(Config const& config, FilterSource const& source, void const* weight, void* filter,
                 cudaStream_t stream) {
  Schedule const& s = config.schedule;
  int const rows = s.groups * s.together * kTaps * kRows;
  Order const order{.source = source,
                    .stride = s.axis.problem.stride,
                    .rotation = s.rotation,
                    .vectors = s.channel_pitch / kVector,
                    .by_row = cutlass::FastDivmod(rows)};
  auto const blocks = unsigned(ceil_div(int64_t(rows) * order.vectors, kThreads));
  conv::check_launch(
      config, 1, "launch of the pass that packs the filter",
      device::launch(&pack_filter_kernel, blocks, kThreads, 0, stream, order,
                     static_cast<uint16_t const*>(weight), static_cast<uint4*>(filter)));
}

}  // namespace fusedconv::conv::sm90::lines
