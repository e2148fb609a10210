// What the kernels of gradient() do to values, and how they are launched.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cuda/math.hpp"
#include "cuda/tile.hpp"
#include "fusedconv/check.hpp"
#include "groupnorm/affine.hpp"
#include "groupnorm/gradient_device.hpp"
#include "layernorm/pixel.hpp"
#include "ungrouped/gradient.hpp"

namespace fusedconv::ungrouped {

using device::Pack;
using groupnorm::Affine;

template <class T, class G>
struct Tensors {
  T const* input;
  G const* grad;
  T* output;  // null: sums alone are wanted
  float* partials;
  Affine affine;
  float eps;
};

// What a kernel knows of the activations when it is compiled: any, which it calls, or one behind
// alone, or none.
enum class Known { kAny, kNone, kRelu, kQuickGelu, kQuickSilu };

inline Known known_of(GroupNormProblem const& p) {
  if (p.activation_before != Activation::kIdentity) return Known::kAny;
  switch (p.activation_after) {
    case Activation::kIdentity: return Known::kNone;
    case Activation::kRelu: return Known::kRelu;
    case Activation::kGelu: return p.quick() ? Known::kQuickGelu : Known::kAny;
    case Activation::kSilu: return p.quick() ? Known::kQuickSilu : Known::kAny;
    default: return Known::kAny;
  }
}

// Calls body with it as a type.
template <class F>
void dispatch_known(GroupNormProblem const& p, F&& body) {
  switch (known_of(p)) {
    case Known::kAny: return body(std::integral_constant<Known, Known::kAny>{});
    case Known::kNone: return body(std::integral_constant<Known, Known::kNone>{});
    case Known::kRelu: return body(std::integral_constant<Known, Known::kRelu>{});
    case Known::kQuickGelu: return body(std::integral_constant<Known, Known::kQuickGelu>{});
    case Known::kQuickSilu: return body(std::integral_constant<Known, Known::kQuickSilu>{});
  }
}

// Whether a kernel reads the input; where it does not, it sums the output's gradient.
template <Kind kKind, Known kKnown>
constexpr bool kReads = kKind != Kind::kIdentity || kKnown != Known::kNone;

// The activation in front.
template <Known kKnown, int kCount>
__device__ __forceinline__ void activate(Affine const& affine, float (&values)[kCount]) {
  if constexpr (kKnown == Known::kAny) {
    groupnorm::activate_by_call(affine.activation_before, affine.quick, values);
  }
}

// A stopped gradient is zero whatever comes, as torch has it.
template <int kCount>
__device__ __forceinline__ void stop_by_relu(float const (&points)[kCount],
                                             float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = points[i] <= 0.0f ? 0.0f : values[i];
}

template <int kCount>
__device__ __forceinline__ void multiply_by_slopes(Activation activation, bool quick,
                                                   float (&points)[kCount],
                                                   float (&values)[kCount]) {
  if (activation == Activation::kIdentity) return;
  if (activation == Activation::kRelu) return stop_by_relu(points, values);
  groupnorm::apply_by_call(
      points, [&](auto lanes) { return groupnorm::slopes_by_call(activation, quick, lanes); });
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] *= points[i];
}

// Gradients of the activation behind to those of the points that it was computed of.
template <Known kKnown, int kCount>
__device__ __forceinline__ void pass_activation(Affine const& affine, float (&points)[kCount],
                                                float (&grads)[kCount]) {
  if constexpr (kKnown == Known::kAny) {
    multiply_by_slopes(affine.activation_after, affine.quick, points, grads);
  } else if constexpr (kKnown == Known::kRelu) {
    stop_by_relu(points, grads);
  } else if constexpr (kKnown != Known::kNone) {
    using Form =
        std::conditional_t<kKnown == Known::kQuickGelu, activations::Gelu, activations::Silu>;
#pragma unroll
    for (int i = 0; i < kCount; ++i) grads[i] *= device::quick_slope<Form>(points[i]);
  }
}

// The gradients g that reach the affine map: entry(i) is the i-th value's weight and bias.
template <Known kKnown, int kCount, class EntryOf>
__device__ __forceinline__ void pass_after(Affine const& affine, float const (&normalized)[kCount],
                                           EntryOf const& entry, float (&grads)[kCount]) {
  if constexpr (kKnown != Known::kNone) {
    float points[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) points[i] = fmaf(normalized[i], entry(i).x, entry(i).y);
    pass_activation<kKnown>(affine, points, grads);
  }
}

// Gradients of activated values to those of what they were activated from.
template <Known kKnown, class T, int kCount>
__device__ __forceinline__ void pass_before(Affine const& affine, Pack<T, kCount> const& input,
                                            float (&grads)[kCount]) {
  if constexpr (kKnown == Known::kAny) {
    float points[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) points[i] = device::to_float(input.values[i]);
    multiply_by_slopes(affine.activation_before, affine.quick, points, grads);
  }
}

template <class T, int kCount>
__device__ __forceinline__ void as_floats(Pack<T, kCount> const& pack, float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = device::to_float(pack.values[i]);
}

// What is stored of the values, which become that.
template <class T, int kCount>
__device__ __forceinline__ Pack<T, kCount> as_stored(float (&values)[kCount]) {
  Pack<T, kCount> pack;
#pragma unroll
  for (int i = 0; i < kCount; ++i) pack.values[i] = device::from_float<T>(values[i]);
  as_floats(pack, values);
  return pack;
}

__device__ __forceinline__ float2 entry_of(Affine const& affine, int channel) {
  return channel < affine.channels ? make_float2(groupnorm::weight_of(affine, channel),
                                                 groupnorm::bias_of(affine, channel))
                                   : float2{};
}

// A channel's sums.
struct Sums {
  float input = 0.0f, grad = 0.0f, projection = 0.0f;
};

// Calls body with each of the sums that a kind has.
template <Kind kKind, class F>
__device__ __forceinline__ void for_each_sum(F&& body) {
  body(&Sums::input);
  if constexpr (sums_of(kKind) == kMostSums) {
    body(&Sums::grad);
    body(&Sums::projection);
  }
}

template <Kind kKind>
__device__ __forceinline__ void leave(float* partials, int64_t part, int channels, int channel,
                                      Sums const& sums) {
  float* own = partials + part * sums_of(kKind) * channels + channel;
  for_each_sum<kKind>([&](auto sum) {
    *own = sums.*sum;
    own += channels;
  });
}

// Statistics of a pixel from sums of deviations from its rounded mean and of their squares, with
// 1 / channels at hand: quotients would be a third of what a pixel of few channels takes. kLow:
// whether what rounding left of the mean counts.
template <bool kLow>
__device__ __forceinline__ layernorm::PixelStatistics statistics_of(float share, float mean,
                                                                    float squares, float deviations,
                                                                    float eps) {
  if constexpr (!kLow) return layernorm::PixelStatistics::of(share, mean, squares, eps);
  float const low = deviations * share;
  float const m2 = fmaf(-deviations, low, squares);
  // Rounding may leave less than nothing where all channels are equal; NaN stays.
  auto statistics = layernorm::PixelStatistics::of(share, mean, m2 < 0.0f ? 0.0f : m2, eps);
  statistics.shift = -low * statistics.rstd;
  return statistics;
}

// Whether one float does not hold a pixel's mean: activations in front widen what is stored.
template <class T, Known kKnown>
constexpr bool kMeanHasLow = layernorm::kKeepsLow<T> || kKnown == Known::kAny;

template <class T, class G>
Tensors<T, G> tensors_of(GroupNormProblem const& p, GradientTensors const& given) {
  return {.input = static_cast<T const*>(given.input),
          .grad = static_cast<G const*>(given.grad_output),
          .output = static_cast<T*>(given.grad_input),
          .partials = given.partials,
          .affine = groupnorm::affine_of(p, given.weight, given.bias, nullptr),
          .eps = float(p.eps)};
}

// Whether accesses of `vector` elements may run along an axis of `extent`; null is aligned.
inline bool serves(GroupNormProblem const& p, GradientTensors const& t, int64_t extent,
                   int vector) {
  int64_t const bytes = vector * size_of(p.dtype);
  int64_t const of_grad = std::min<int64_t>(16, vector * size_of(p.output_dtype));
  return extent % vector == 0 && device::is_aligned(t.input, bytes) &&
         device::is_aligned(t.grad_output, of_grad) && device::is_aligned(t.grad_input, bytes);
}

// Calls body(T{}, G{}): T is the problem's dtype, G that of the output's gradient.
template <class F>
void dispatch_types(GroupNormProblem const& p, F&& body) {
  device::dispatch_type(p.dtype, [&](auto zero) {
    if constexpr (sizeof(zero) == 2) {
      if (groupnorm::has_wide_gradient(p)) return body(zero, float{});
    }
    body(zero, zero);
  });
}

}  // namespace fusedconv::ungrouped
