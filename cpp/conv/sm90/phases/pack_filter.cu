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
  int axes, channels;                              // of a block
  int steps;                                       // of 16 input channels
  cutlass::FastDivmod by_tap, by_round, by_block;  // vectors, products and rounds
  int64_t vectors;
};

// A thread has eight input channels of a column. Both halves of 16 channels follow each other, each
// with a phase's columns in turn.
__global__ void __launch_bounds__(kThreads)
    pack_filter_kernel(__grid_constant__ Order const order, uint16_t const* weight, uint4* filter) {
  constexpr Products kProductsOfRound;
  device::release_early();
  int const i = int(blockIdx.x) * kThreads + int(threadIdx.x);
  if (i >= order.vectors) return;
  int number, at, product, block;
  order.by_tap(number, at, i);
  order.by_round(number, product, number);
  order.by_block(block, number, number);
  auto const [depth, step] = round_of(number, order.steps);
  auto const [own_neighbour, own_phase] = kProductsOfRound.values[product];
  int const neighbour = own_neighbour | depth_product(depth).neighbour;
  int const phase = own_phase | depth_product(depth).phase;
  int const half = at / order.channels, column = at % order.channels;
  int const channel = block * order.channels + channel_of(column, order.channels);
  FilterSource const& f = order.source;
  auto const tap = [phase, neighbour](int bit) { return tap_of(phase & bit, neighbour & bit); };
  int64_t const first = channel * f.stride_k +
                        (order.axes == kMaxAxes ? tap(kDepth) * f.stride_t : 0) +
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
                    .steps = s.steps,
                    .by_tap = cutlass::FastDivmod(tap_vectors),
                    .by_round = cutlass::FastDivmod(kProducts),
                    .by_block = cutlass::FastDivmod(s.steps * shape.depth_products()),
                    .vectors = s.filter_bytes / 16};
  conv::check_launch(
      config, 1, "launch of the pass that packs the filter",
      device::launch(&pack_filter_kernel, unsigned(ceil_div(order.vectors, kThreads)), kThreads, 0,
                     stream, order, static_cast<uint16_t const*>(weight),
                     static_cast<uint4*>(filter)));
}

}  // namespace fusedconv::conv::sm90::phases
