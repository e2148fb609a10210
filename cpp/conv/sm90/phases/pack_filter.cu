#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "conv/failure.hpp"
#include "conv/sm90/phases/rows.hpp"
#include "cuda/early.hpp"
#include "cuda/launch.hpp"
#include "cutlass/fast_math.h"

namespace fusedconv::conv::sm90::phases {
namespace {

constexpr int kThreads = 128;

struct Order {
  FilterSource source;
  int axes, channels;                             // of a block
  cutlass::FastDivmod by_tap, by_step, by_block;  // vectors, taps and steps of 16 input channels
  int64_t vectors;
};

// A thread has eight input channels of a column. Both halves of 16 channels follow each other, each
// with a phase's columns in turn.
__global__ void __launch_bounds__(kThreads)
    pack_filter_kernel(__grid_constant__ Order const order, uint16_t const* weight, uint4* filter) {
  constexpr Products<2> kFlat;
  constexpr Products<3> kDeep;
  device::release_early();
  int const i = int(blockIdx.x) * kThreads + int(threadIdx.x);
  if (i >= order.vectors) return;
  int number, at, product, step, block;
  order.by_tap(number, at, i);
  order.by_step(number, product, number);
  order.by_block(block, step, number);
  auto const [neighbour, phase] = order.axes == 3 ? kDeep.values[product] : kFlat.values[product];
  int const half = at / order.channels, column = at % order.channels;
  int const channel = block * order.channels + channel_of(column, order.channels);
  FilterSource const& f = order.source;
  auto const tap = [phase, neighbour](int bit) { return tap_of(phase & bit, neighbour & bit); };
  int64_t const first = channel * f.stride_k + (order.axes == 3 ? tap(kDepth) * f.stride_t : 0) +
                        tap(kHeight) * f.stride_r + tap(kWidth) * f.stride_s;
  int const c0 = step * kStepChannels + half * kVector;
  uint16_t values[kVector] = {};
  if (channel < f.k) {
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      if (c0 + v < f.c) values[v] = weight[first + (c0 + v) * f.stride_c];
    }
  }
  filter[i] = *reinterpret_cast<uint4*>(values);
}

}  // namespace

void pack_filter(Config const& config, FilterSource const& source, void const* weight, void* filter,
                 cudaStream_t stream) {
  Schedule const& s = config.schedule;
  Shape const& shape = config.row->shape;
  int const tap_vectors = shape.channels * kStepChannels / kVector;
  Order const order{.source = source,
                    .axes = shape.axes,
                    .channels = shape.channels,
                    .by_tap = cutlass::FastDivmod(tap_vectors),
                    .by_step = cutlass::FastDivmod(shape.taps()),
                    .by_block = cutlass::FastDivmod(s.steps),
                    .vectors = s.filter_bytes / 16};
  conv::check_launch(
      config, 1, "launch of the pass that packs the filter",
      device::launch(&pack_filter_kernel, unsigned(ceil_div(order.vectors, kThreads)), kThreads, 0,
                     stream, order, static_cast<uint16_t const*>(weight),
                     static_cast<uint4*>(filter)));
}

}  // namespace fusedconv::conv::sm90::phases
