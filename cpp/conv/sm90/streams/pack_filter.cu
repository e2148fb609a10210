#include <cstdint>

#include "conv/failure.hpp"
#include "conv/sm90/streams/rows.hpp"
#include "cuda/early.hpp"
#include "cuda/launch.hpp"
#include "cuda/math.hpp"
#include "cutlass/fast_math.h"

namespace fusedconv::conv::sm90::streams {
namespace {

constexpr int kThreads = 128;

struct Order {
  FilterSource source;
  int stride, columns;
  cutlass::FastDivmod by_columns, by_chunks, by_stride;
  int64_t vectors;
};

// A thread has four channels of a column. Threads beside each other have columns beside each other,
// whose taps lie beside each other.
__global__ void __launch_bounds__(kThreads)
    pack_filter_kernel(__grid_constant__ Order const order, float const* weight, float4* filter) {
  constexpr int kUnits = kChunk / kVector;
  device::release_early();
  int const i = int(blockIdx.x) * kThreads + int(threadIdx.x);
  if (i >= order.vectors) return;
  int number, column, group, chunk, channel, phase;
  order.by_columns(number, column, i);
  int const unit = number % kUnits, tap = number / kUnits % kTaps;
  order.by_chunks(group, chunk, number / (kUnits * kTaps));
  order.by_stride(channel, phase, group * order.columns + column);
  FilterSource const& f = order.source;
  int const s = phase + tap * order.stride, c0 = chunk * kChunk + unit * kVector;
  float values[kVector] = {};
  if (channel < f.k && s < f.s) {
    float const* const first = weight + channel * f.stride_k + s * f.stride_s;
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      if (c0 + v < f.c) values[v] = device::round_to_tf32(first[(c0 + v) * f.stride_c]);
    }
  }
  filter[i] = {values[0], values[1], values[2], values[3]};
}

}  // namespace

void pack_filter(Config const& config, FilterSource const& source, void const* weight, void* filter,
                 cudaStream_t stream) {
  Schedule const& s = config.schedule;
  int const columns = config.row->shape.columns, stride = config.axis().stride;
  Order const order{.source = source,
                    .stride = stride,
                    .columns = columns,
                    .by_columns = cutlass::FastDivmod(columns),
                    .by_chunks = cutlass::FastDivmod(s.chunks),
                    .by_stride = cutlass::FastDivmod(stride),
                    .vectors = s.filter_bytes / 16};
  conv::check_launch(
      config, 1, "launch of the pass that packs the filter",
      device::launch(&pack_filter_kernel, unsigned(ceil_div(order.vectors, kThreads)), kThreads, 0,
                     stream, order, static_cast<float const*>(weight),
                     static_cast<float4*>(filter)));
}

}  // namespace fusedconv::conv::sm90::streams
