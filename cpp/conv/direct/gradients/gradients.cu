#include "conv/direct/gradients/gradients.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <type_traits>

#include "cuda/launch.hpp"
#include "cuda/math.hpp"
#include "cuda/sum.hpp"
#include "cuda/tile.hpp"
#include "cutlass/fast_math.h"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::direct {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
// Channels last: neighbouring threads have neighbouring channels, several each where these are as
// many, and so many threads have a position.
constexpr int kLanes = 32;
constexpr int kVector = 2;
constexpr int kRows = kThreads / kLanes;
// Positions of a thread, at least: adding up its part of the weight's gradient costs as much as
// some of them.
constexpr int kThreadPositions = 16;
constexpr int kMostParts = 1024;
constexpr int kTapGroup = 16;  // of filters that no kernel was compiled for, taken in turn
constexpr int kSlices = 8;     // of the parts, a thread each

struct Params {
  AxisProblem axes[kMaxAxes];
  FilterSource source;
  int channels;
  int runs, run;
  int input_pixels, output_pixels;
  int taps;
  cutlass::FastDivmod height, width;  // of the input
};

template <class T>
struct Tensors {
  T const* input;
  T const* grad;
  T const* weight;
  T* grad_input;    // null where it is not wanted
  float* partials;  // null where they are not
};

template <class T>
__device__ __forceinline__ float load_weight(Params const& p, T const* weight, int channel,
                                             int tap) {
  int const s = tap % p.axes[2].kernel, rest = tap / p.axes[2].kernel;
  int const r = rest % p.axes[1].kernel, t = rest / p.axes[1].kernel;
  FilterSource const& w = p.source;
  return device::to_float(
      weight[channel * w.stride_c + t * w.stride_t + r * w.stride_r + s * w.stride_s]);
}

// Where the first tap of each axis meets the output.
struct Corner {
  int at[kMaxAxes];

  __device__ __forceinline__ Corner(Params const& p, int position) {
    int rest, d, h, w;
    p.width(rest, w, position);
    p.height(d, h, rest);
    at[0] = d * p.axes[0].stride - p.axes[0].padding;
    at[1] = h * p.axes[1].stride - p.axes[1].padding;
    at[2] = w * p.axes[2].stride - p.axes[2].padding;
  }
};

// A filter that is known when the kernel is compiled: calls use(tap, load(output pixel)) for each
// of its taps that meets an output. A plane's loads are under way together, by no branches where
// all taps meet one.
template <int kD, int kH, int kW>
struct Known {
  static constexpr int kTaps = kD * kH * kW;

  template <class Load, class Use>
  __device__ __forceinline__ static void for_each(Params const& p, Corner const& corner, int,
                                                  Load const& load, Use const& use) {
    constexpr int kTapsOf[kMaxAxes] = {kD, kH, kW};
    bool whole = true;
#pragma unroll
    for (int a = 0; a < kMaxAxes; ++a) {
      int const last = corner.at[a] + (kTapsOf[a] - 1) * p.axes[a].dilation;
      whole = whole && corner.at[a] >= 0 && last < p.axes[a].output;
    }
    if (whole) {
      for_each_of<true>(p, corner, load, use);
    } else {
      for_each_of<false>(p, corner, load, use);
    }
  }

 private:
  template <bool kWhole, class Load, class Use>
  __device__ __forceinline__ static void for_each_of(Params const& p, Corner const& corner,
                                                     Load const& load, Use const& use) {
    auto const meets = [&](int axis, int tap) {
      int const at = corner.at[axis] + tap * p.axes[axis].dilation;
      return kWhole || unsigned(at) < unsigned(p.axes[axis].output);
    };
#pragma unroll
    for (int t = 0; t < kD; ++t) {
      bool const has_plane = meets(0, t);
      decltype(load(0)) values[kH * kW];
#pragma unroll
      for (int r = 0; r < kH; ++r) {
        int const line = (corner.at[0] + t * p.axes[0].dilation) * p.axes[1].output + corner.at[1] +
                         r * p.axes[1].dilation;
        int const pixel = line * p.axes[2].output + corner.at[2];
#pragma unroll
        for (int s = 0; s < kW; ++s) {
          if (has_plane && meets(1, r) && meets(2, s)) {
            values[r * kW + s] = load(pixel + s * p.axes[2].dilation);
          }
        }
      }
#pragma unroll
      for (int r = 0; r < kH; ++r) {
#pragma unroll
        for (int s = 0; s < kW; ++s) {
          if (has_plane && meets(1, r) && meets(2, s)) {
            use((t * kH + r) * kW + s, values[r * kW + s]);
          }
        }
      }
    }
  }
};

// Some kTapGroup taps of any filter, from `first` on.
struct Any {
  static constexpr int kTaps = kTapGroup;

  template <class Load, class Use>
  __device__ __forceinline__ static void for_each(Params const& p, Corner const& corner, int first,
                                                  Load const& load, Use const& use) {
#pragma unroll
    for (int i = 0; i < kTaps; ++i) {
      int const tap = first + i;
      if (tap >= p.taps) continue;
      int const s = tap % p.axes[2].kernel, rest = tap / p.axes[2].kernel;
      int const r = rest % p.axes[1].kernel, t = rest / p.axes[1].kernel;
      int const z = corner.at[0] + t * p.axes[0].dilation;
      int const y = corner.at[1] + r * p.axes[1].dilation;
      int const x = corner.at[2] + s * p.axes[2].dilation;
      if (unsigned(z) < unsigned(p.axes[0].output) && unsigned(y) < unsigned(p.axes[1].output) &&
          unsigned(x) < unsigned(p.axes[2].output)) {
        use(i, load((z * p.axes[1].output + y) * p.axes[2].output + x));
      }
    }
  }
};

// Channels first. Block (run, plane).
template <class T, class Filter>
__global__ void __launch_bounds__(kThreads)
    gradients_of_planes(Params const p, Tensors<T> const tensors) {
  constexpr int kTaps = Filter::kTaps;
  constexpr bool kKnown = !std::is_same_v<Filter, Any>;
  __shared__ float weights[kTaps];
  __shared__ float sums_of_warps[kWarps][kTaps];
  int const run = int(blockIdx.x % unsigned(p.runs));
  int const plane = int(blockIdx.x / unsigned(p.runs));
  int const channel = plane % p.channels, sample = plane / p.channels;
  int const begin = run * p.run, end = min(begin + p.run, p.input_pixels);
  T const* const input = tensors.input + int64_t(plane) * p.input_pixels;
  T const* const grad = tensors.grad + int64_t(plane) * p.output_pixels;
  bool const wants_weight = tensors.partials != nullptr;
#pragma unroll 1
  for (int first = 0; first < p.taps; first += kTaps) {
    __syncthreads();
    for (int i = threadIdx.x; i < min(kTaps, p.taps - first); i += kThreads) {
      weights[i] = load_weight(p, tensors.weight, channel, first + i);
    }
    __syncthreads();
    float sums[kTaps] = {};
#pragma unroll 1
    for (int i = begin + int(threadIdx.x); i < end; i += kThreads) {
      Corner const corner(p, i);
      float const value = wants_weight ? device::to_float(input[i]) : 0.0f;
      float total = 0.0f;
      Filter::for_each(
          p, corner, first, [&](int pixel) { return grad[pixel]; },
          [&](int tap, T loaded) {
            float const given = device::to_float(loaded);
            total = fmaf(given, weights[tap], total);
            sums[tap] = fmaf(given, value, sums[tap]);
          });
      // The taps of other filters are gone over once more for this, by their own kernel.
      if constexpr (kKnown) {
        if (tensors.grad_input != nullptr) {
          tensors.grad_input[int64_t(plane) * p.input_pixels + i] = device::from_float<T>(total);
        }
      }
    }
    if (!wants_weight) continue;
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) {
      float const sum = device::warp_total(sums[tap]);
      if (threadIdx.x % 32 == 0) sums_of_warps[threadIdx.x / 32][tap] = sum;
    }
    __syncthreads();
    for (int tap = threadIdx.x; tap < min(kTaps, p.taps - first); tap += kThreads) {
      float sum = 0.0f;
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) sum += sums_of_warps[warp][tap];
      int64_t const part = int64_t(sample) * p.runs + run;
      tensors.partials[(part * p.channels + channel) * p.taps + first + tap] = sum;
    }
  }
}

// Channels last. Block (run of a sample, slab of channels); a thread has kChannels.
template <class T, class Filter, int kChannels>
__global__ void __launch_bounds__(kThreads, 2)
    gradients_of_pixels(Params const p, Tensors<T> const tensors) {
  using Pack = device::Pack<T, kChannels>;
  constexpr int kTaps = Filter::kTaps;
  constexpr bool kKnown = !std::is_same_v<Filter, Any>;
  constexpr int kWidth = kLanes * kChannels;
  __shared__ float weights[kTaps][kWidth];
  __shared__ float totals[kTaps][kWidth];
  int const run = int(blockIdx.x % unsigned(p.runs));
  int const sample = int(blockIdx.x / unsigned(p.runs));
  int const lane = int(threadIdx.x) % kLanes, row = int(threadIdx.x) / kLanes;
  int const own = lane * kChannels;  // of the slab's channels
  int const channel = int(blockIdx.y) * kWidth + own;
  bool const exists = channel < p.channels;
  int const begin = run * p.run, end = min(begin + p.run, p.input_pixels);
  T const* const input = tensors.input + int64_t(sample) * p.input_pixels * p.channels + channel;
  T const* const grad = tensors.grad + int64_t(sample) * p.output_pixels * p.channels + channel;
  bool const wants_weight = tensors.partials != nullptr;
#pragma unroll 1
  for (int first = 0; first < p.taps; first += kTaps) {
    __syncthreads();
    for (int tap = row; tap < min(kTaps, p.taps - first); tap += kRows) {
      for (int c = 0; c < kChannels; ++c) {
        weights[tap][own + c] =
            exists ? load_weight(p, tensors.weight, channel + c, first + tap) : 0.0f;
      }
    }
    __syncthreads();
    float sums[kTaps][kChannels] = {};
#pragma unroll 1
    for (int i = begin + row; i < (exists ? end : begin); i += kRows) {
      Corner const corner(p, i);
      Pack const values = wants_weight ? Pack::load(input + int64_t(i) * p.channels) : Pack();
      float total[kChannels] = {};
      Filter::for_each(
          p, corner, first,
          [&](int pixel) { return Pack::load(grad + int64_t(pixel) * p.channels); },
          [&](int tap, Pack const& loaded) {
#pragma unroll
            for (int c = 0; c < kChannels; ++c) {
              float const given = device::to_float(loaded.values[c]);
              total[c] = fmaf(given, weights[tap][own + c], total[c]);
              sums[tap][c] = fmaf(given, device::to_float(values.values[c]), sums[tap][c]);
            }
          });
      if constexpr (kKnown) {
        if (tensors.grad_input != nullptr) {
          int64_t const at = (int64_t(sample) * p.input_pixels + i) * p.channels + channel;
          Pack result;
#pragma unroll
          for (int c = 0; c < kChannels; ++c) result.values[c] = device::from_float<T>(total[c]);
          result.store(tensors.grad_input + at);
        }
      }
    }
    if (!wants_weight) continue;
    // The rows of threads in their order.
    for (int adding = 0; adding < kRows; ++adding) {
      if (row == adding) {
#pragma unroll
        for (int tap = 0; tap < kTaps; ++tap) {
#pragma unroll
          for (int c = 0; c < kChannels; ++c) {
            float const before = adding == 0 ? 0.0f : totals[tap][own + c];
            totals[tap][own + c] = before + sums[tap][c];
          }
        }
      }
      __syncthreads();
    }
    int64_t const part = int64_t(sample) * p.runs + run;
    for (int tap = row; tap < min(kTaps, p.taps - first); tap += kRows) {
      for (int c = 0; exists && c < kChannels; ++c) {
        tensors.partials[(part * p.channels + channel + c) * p.taps + first + tap] =
            totals[tap][own + c];
      }
    }
  }
}

// The input's gradient alone, of any filter. An element a thread, in the tensors' order.
template <class T, bool kLast>
__global__ void __launch_bounds__(kThreads)
    input_gradient(Params const p, Tensors<T> const tensors, int64_t elements) {
  int64_t const element = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (element >= elements) return;
  int64_t const inner = kLast ? element / p.channels : element;
  int64_t const outer = inner / p.input_pixels;  // a plane, or a sample
  int const position = int(inner % p.input_pixels);
  int const channel = int(kLast ? element % p.channels : outer % p.channels);
  int const step = kLast ? p.channels : 1;
  T const* const grad = tensors.grad + outer * p.output_pixels * step + (kLast ? channel : 0);
  Corner const corner(p, position);
  float total = 0.0f;
  for (int first = 0; first < p.taps; first += kTapGroup) {
    float part = 0.0f;  // sums of sums: one chain over a large filter would err by more
    Any::for_each(
        p, corner, first, [&](int pixel) { return grad[int64_t(pixel) * step]; },
        [&](int tap, T given) {
          float const weight = load_weight(p, tensors.weight, channel, first + tap);
          part = fmaf(device::to_float(given), weight, part);
        });
    total += part;
  }
  tensors.grad_input[element] = device::from_float<T>(total);
}

// 32 numbers of the weight's gradient a block.
template <class T>
__global__ void __launch_bounds__(32 * kSlices)
    add_parts_of_weight(float const* __restrict__ partials, int parts, int numbers,
                        T* __restrict__ grad_weight) {
  int const number = int(blockIdx.x) * 32 + int(threadIdx.x) % 32;
  bool const exists = number < numbers;
  float const total =
      device::total_of_parts<kSlices>(exists ? partials + number : nullptr, parts, numbers);
  if (exists && threadIdx.x < 32) grad_weight[number] = device::from_float<T>(total);
}

int pixels_of(TransposedProblem const& p, int AxisProblem::* extent) {
  int64_t pixels = 1;
  for (AxisProblem const& axis : p.axes) pixels *= axis.*extent;
  return int(std::min<int64_t>(pixels, std::numeric_limits<int>::max()));
}

// Calls body with the filter's type.
template <class F>
void dispatch_filter(TransposedProblem const& p, F&& body) {
  int const d = p.axes[0].kernel, h = p.axes[1].kernel, w = p.axes[2].kernel;
  auto const is = [&](int depth, int height, int width) {
    return d == depth && h == height && w == width;
  };
  if (is(1, 1, 3)) return body(Known<1, 1, 3>{});
  if (is(1, 1, 4)) return body(Known<1, 1, 4>{});
  if (is(1, 2, 2)) return body(Known<1, 2, 2>{});
  if (is(1, 3, 3)) return body(Known<1, 3, 3>{});
  if (is(1, 4, 4)) return body(Known<1, 4, 4>{});
  if (is(1, 5, 5)) return body(Known<1, 5, 5>{});
  if (is(2, 2, 2)) return body(Known<2, 2, 2>{});
  if (is(3, 3, 3)) return body(Known<3, 3, 3>{});
  body(Any{});
}

}  // namespace

GradientConfig gradient_config(TransposedProblem const& p, DType dtype, int64_t batch) {
  GradientConfig config;
  config.problem = p;
  config.dtype = dtype;
  config.batch = batch;
  auto const refuse = [&](std::string reason) {
    config.support = Support::no(std::move(reason));
    return config;
  };
  if (p.channels != 1 || p.output_channels != 1) {
    return refuse(detail::join("groups have ", p.channels, " channels and ", p.output_channels,
                               " output channels, one of each is served"));
  }
  int const pixels = pixels_of(p, &AxisProblem::input);
  int const outputs = pixels_of(p, &AxisProblem::output);
  constexpr int kMost = 1 << 30;
  if (pixels >= kMost || outputs >= kMost) {
    return refuse(detail::join("a plane has ", std::max(pixels, outputs),
                               " pixels, they are counted to ", kMost));
  }
  config.taps = pixels_of(p, &AxisProblem::kernel);
  dispatch_filter(p, [&](auto filter) { config.known = !std::is_same_v<decltype(filter), Any>; });
  constexpr int kMostSlabs = 0xffff;  // of channels, side by side
  if (p.groups > kMostSlabs * kLanes) {
    return refuse(
        detail::join("groups is ", p.groups, ", up to ", kMostSlabs * kLanes, " are served"));
  }
  if (batch == 0 || pixels == 0 || outputs == 0) return refuse("the input is empty");
  bool const last = p.layout == Layout::kChannelsLast;
  int64_t const least = int64_t(kThreadPositions) * (last ? kRows : kThreads);
  int64_t const most_runs = std::max<int64_t>(1, kMostParts / batch);
  int64_t const run = std::max(least, ceil_div(pixels, most_runs));
  config.run = int(std::min<int64_t>(run, pixels));
  config.runs = int(ceil_div(pixels, config.run));
  if (config.parts() > std::numeric_limits<int>::max() ||
      int64_t(p.groups) * config.taps > std::numeric_limits<int>::max()) {
    return refuse(detail::join("batch is ", batch, ", groups ", p.groups));
  }
  if (batch * p.groups * config.runs > std::numeric_limits<int>::max()) {
    return refuse(detail::join("batch x groups is ", batch * p.groups));
  }
  config.support = Support::yes();
  return config;
}

void depthwise_gradients(GradientConfig const& config, FilterSource const& source,
                         GradientTensors const& given, cudaStream_t stream) {
  TransposedProblem const& problem = config.problem;
  Params p{};
  std::copy(problem.axes.begin(), problem.axes.end(), p.axes);
  p.source = source;
  p.channels = problem.groups;
  p.runs = config.runs;
  p.run = config.run;
  p.input_pixels = pixels_of(problem, &AxisProblem::input);
  p.output_pixels = pixels_of(problem, &AxisProblem::output);
  p.taps = config.taps;
  p.height = cutlass::FastDivmod(problem.axes[1].input);
  p.width = cutlass::FastDivmod(problem.axes[2].input);
  bool const last = problem.layout == Layout::kChannelsLast;
  device::dispatch_type(config.dtype, [&](auto zero) {
    using T = decltype(zero);
    Tensors<T> const tensors{.input = static_cast<T const*>(given.input),
                             .grad = static_cast<T const*>(given.grad_output),
                             .weight = static_cast<T const*>(given.weight),
                             .grad_input = static_cast<T*>(given.grad_input),
                             .partials = given.partials};
    dispatch_filter(problem, [&](auto filter) {
      using Filter = decltype(filter);
      constexpr bool kKnown = !std::is_same_v<Filter, Any>;
      if (kKnown || tensors.partials != nullptr) {
        if (last) {
          auto const launch = [&](auto channels) {
            dim3 const grid =
                device::checked_grid("gradients_of_pixels", config.batch * config.runs,
                                     ceil_div(p.channels, kLanes * channels.value));
            device::launch(gradients_of_pixels<T, Filter, channels.value>, grid, kThreads, 0,
                           stream, p, tensors);
          };
          bool const several =
              p.channels % kVector == 0 && p.channels > kLanes &&
              std::ranges::all_of(
                  std::array<void const*, 3>{given.input, given.grad_output, given.grad_input},
                  [](void const* tensor) {
                    return device::is_aligned(tensor, kVector * sizeof(T));
                  });
          if (several) {
            launch(std::integral_constant<int, kVector>{});
          } else {
            launch(std::integral_constant<int, 1>{});
          }
        } else {
          dim3 const grid =
              device::checked_grid("gradients_of_planes", config.batch * p.channels * config.runs);
          device::launch(gradients_of_planes<T, Filter>, grid, kThreads, 0, stream, p, tensors);
        }
        FUSEDCONV_CUDA("depthwise_gradients", cudaGetLastError());
      }
      if (kKnown || tensors.grad_input == nullptr) return;
      int64_t const elements = config.batch * p.channels * p.input_pixels;
      dim3 const grid = device::checked_grid("input_gradient", ceil_div(elements, kThreads));
      if (last) {
        device::launch(input_gradient<T, true>, grid, kThreads, 0, stream, p, tensors, elements);
      } else {
        device::launch(input_gradient<T, false>, grid, kThreads, 0, stream, p, tensors, elements);
      }
      FUSEDCONV_CUDA("input_gradient", cudaGetLastError());
    });
  });
}

void add_weight_parts(GradientConfig const& config, float const* partials, void* grad_weight,
                      cudaStream_t stream) {
  int const numbers = config.problem.groups * config.taps;
  dim3 const grid = device::checked_grid("add_parts_of_weight", ceil_div(numbers, 32));
  device::dispatch_type(config.dtype, [&](auto zero) {
    using T = decltype(zero);
    device::launch(add_parts_of_weight<T>, grid, 32 * kSlices, 0, stream, partials,
                   int(config.parts()), numbers, static_cast<T*>(grad_weight));
  });
  FUSEDCONV_CUDA("add_parts_of_weight", cudaGetLastError());
}

}  // namespace fusedconv::conv::direct
