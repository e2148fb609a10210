#include "conv/direct/gradients/few_channels.hpp"

#include <algorithm>

#include "conv/direct/gradients/few_kernel.hpp"
#include "cuda/launch.hpp"
#include "cuda/sum.hpp"
#include "cuda/tile.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::direct::few {
namespace {

constexpr int kSlices = 32;  // of the parts, a warp each

Params params_of(Config const& config, FilterSource const& source, Tensors const& tensors) {
  Params p{};
  p.tensors = tensors;
  p.dtype = config.dtype;
  p.source = source;
  std::copy_n(config.axes, kMaxAxes, p.axes);
  std::copy_n(config.input_strides, kMaxAxes + 1, p.input_strides);
  std::copy_n(config.output_strides, kMaxAxes + 1, p.output_strides);
  p.input_channel = p.output_channel = 1;
  for (AxisProblem const& axis : config.problem.axes) {
    p.input_channel *= axis.input;
    p.output_channel *= axis.output;
  }
  p.output_channels = config.problem.output_channels;
  p.numbers = config.taps() * config.problem.channels;
  std::copy_n(config.tile, 2, p.tile);
  std::copy_n(config.lines, 2, p.lines);
  p.line_slots = line_slots(config.lines[0] * config.lines[1]);
  for (int i = 0; i < kMaxAxes; ++i) {
    AxisProblem const& axis = config.axes[i];
    p.reached[i] = std::min(axis.output, axis.stride * (axis.input - 1) +
                                             axis.dilation * (axis.kernel - 1) - axis.padding + 1);
  }
  AxisProblem const& width = config.axes[2];
  p.width = width.stride * (kTileWidth - 1) + width.dilation * (width.kernel - 1) + 1;
  p.items = int(config.items());
  p.blocks = tensors.partials != nullptr ? config.parts() : p.items;
  p.tiles_d = cutlass::FastDivmod(config.tiles[0]);
  p.tiles_h = cutlass::FastDivmod(config.tiles[1]);
  p.tiles_w = cutlass::FastDivmod(config.tiles[2]);
  p.kernel_h = cutlass::FastDivmod(config.axes[1].kernel);
  return p;
}

template <int kStride, int kKernel, int kChannels, bool kInput, bool kWeighs>
void launch(Config const& config, Params const& p, cudaStream_t stream) {
  constexpr auto kernel = &gradients<kStride, kKernel, kChannels, kInput, kWeighs>;
  FUSEDCONV_CUDA("gradients of few channels",
                 device::allow_shared_bytes<kernel>(config.shared_bytes));
  device::launch(kernel, p.blocks, kThreads, config.shared_bytes, stream, p);
  FUSEDCONV_CUDA("gradients of few channels", cudaGetLastError());
}

template <int kStride, int kKernel, int kChannels>
void launch_wanted(Config const& config, Params const& p, cudaStream_t stream) {
  bool const input = p.tensors.grad_input != nullptr, weighs = p.tensors.partials != nullptr;
  if (input && weighs) return launch<kStride, kKernel, kChannels, true, true>(config, p, stream);
  if (input) return launch<kStride, kKernel, kChannels, true, false>(config, p, stream);
  launch<kStride, kKernel, kChannels, false, true>(config, p, stream);
}

template <int kStride, int kKernel>
void launch_columns(Config const& config, Params const& p, cudaStream_t stream) {
  switch (config.problem.channels) {
    case 1: return launch_wanted<kStride, kKernel, 1>(config, p, stream);
    case 2: return launch_wanted<kStride, kKernel, 2>(config, p, stream);
    case 3: return launch_wanted<kStride, kKernel, 3>(config, p, stream);
    case 4: return launch_wanted<kStride, kKernel, 4>(config, p, stream);
  }
}

// 32 numbers a block: [K, taps, C] in the parts, anywhere in the gradient.
template <class T>
__global__ void __launch_bounds__(32 * kSlices)
    add_parts_of_few(float const* __restrict__ partials, int parts, int numbers, int taps,
                     int channels, cutlass::FastDivmod kernel_h, cutlass::FastDivmod kernel_w,
                     FilterSource const target, T* __restrict__ grad_weight) {
  int const number = int(blockIdx.x) * 32 + int(threadIdx.x) % 32;
  bool const exists = number < numbers;
  float const total =
      device::total_of_parts<kSlices>(exists ? partials + number : nullptr, parts, numbers);
  if (!exists || threadIdx.x >= 32) return;
  int const c = number % channels, tap = number / channels % taps, k = number / channels / taps;
  int row, t, r, s;
  kernel_w(row, s, tap);
  kernel_h(t, r, row);
  grad_weight[c * target.stride_c + k * target.stride_k + t * target.stride_t +
              r * target.stride_r + s * target.stride_s] = device::from_float<T>(total);
}

}  // namespace

void compute_gradients(Config const& config, FilterSource const& source, Tensors const& tensors,
                       cudaStream_t stream) {
  Params const p = params_of(config, source, tensors);
  int const kernel = config.problem.axes[2].kernel;
  if (config.stride == 2) {
    switch (kernel) {
      case 3: return launch_columns<2, 3>(config, p, stream);
      case 4: return launch_columns<2, 4>(config, p, stream);
      case 5: return launch_columns<2, 5>(config, p, stream);
    }
  }
  switch (kernel) {
    case 2: return launch_columns<0, 2>(config, p, stream);
    case 3: return launch_columns<0, 3>(config, p, stream);
    case 4: return launch_columns<0, 4>(config, p, stream);
    case 5: return launch_columns<0, 5>(config, p, stream);
  }
}

void add_parts(Config const& config, FilterSource const& target, float const* partials,
               void* grad_weight, cudaStream_t stream) {
  dim3 const grid = device::checked_grid("add_parts_of_few", ceil_div(config.numbers(), 32));
  device::dispatch_type(config.dtype, [&](auto zero) {
    using T = decltype(zero);
    device::launch(add_parts_of_few<T>, grid, 32 * kSlices, 0, stream, partials, config.parts(),
                   config.numbers(), config.taps(), config.problem.channels,
                   cutlass::FastDivmod(config.axes[1].kernel),
                   cutlass::FastDivmod(config.axes[2].kernel), target,
                   static_cast<T*>(grad_weight));
  });
  FUSEDCONV_CUDA("add_parts_of_few", cudaGetLastError());
}

}  // namespace fusedconv::conv::direct::few
