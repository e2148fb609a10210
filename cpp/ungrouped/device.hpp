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
#include "ungrouped/gradient.hpp"

namespace fusedconv::ungrouped {

using device::Pack;
using groupnorm::Affine;

template <class T>
struct Tensors {
  T const* input;
  T const* grad;
  T* output;  // null: sums alone are wanted
  float* partials;
  Affine affine;
  float eps;
};

// What a kernel knows of the activations when it is compiled: any, which it calls, or one behind
// alone, or none.
enum class Known { kAny, kNone, kRelu, kQuickGelu };

inline Known known_of(GroupNormProblem const& p) {
  if (p.activation_before != Activation::kIdentity) return Known::kAny;
  switch (p.activation_after) {
    case Activation::kIdentity: return Known::kNone;
    case Activation::kRelu: return Known::kRelu;
    case Activation::kGelu: return p.quick() ? Known::kQuickGelu : Known::kAny;
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
  }
}

// The activation in front.
template <Known kKnown, int kCount>
__device__ __forceinline__ void activate(Affine const& affine, float (&values)[kCount]) {
  if constexpr (kKnown == Known::kAny) {
    groupnorm::activate_by_call(affine.activation_before, affine.quick, values);
  }
}

template <int kCount>
__device__ __forceinline__ void multiply_by_slopes(Activation activation, bool quick,
                                                   float (&points)[kCount],
                                                   float (&values)[kCount]) {
  if (activation == Activation::kIdentity) return;
  groupnorm::apply_by_call(
      points, [&](auto lanes) { return groupnorm::slopes_by_call(activation, quick, lanes); });
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] *= points[i];
}

// The gradients g that reach the affine map: entry(i) is the i-th value's weight and bias.
template <Known kKnown, int kCount, class EntryOf>
__device__ __forceinline__ void pass_after(Affine const& affine, float const (&normalized)[kCount],
                                           EntryOf const& entry, float (&grads)[kCount]) {
  if constexpr (kKnown != Known::kNone) {
    float points[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) points[i] = fmaf(normalized[i], entry(i).x, entry(i).y);
    if constexpr (kKnown == Known::kAny) {
      multiply_by_slopes(affine.activation_after, affine.quick, points, grads);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        grads[i] *= kKnown == Known::kRelu ? activations::Relu::slope(points[i])
                                           : device::quick_slope<activations::Gelu>(points[i]);
      }
    }
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
  for (int i = 0; i < kCount; ++i) {
    pack.values[i] = device::from_float<T>(values[i]);
    values[i] = device::to_float(pack.values[i]);
  }
  return pack;
}

__device__ __forceinline__ float2 entry_of(Affine const& affine, int channel) {
  return channel < affine.channels ? make_float2(groupnorm::weight_of(affine, channel),
                                                 groupnorm::bias_of(affine, channel))
                                   : float2{};
}

// A channel's sums.
struct Sums {
  float grad = 0.0f, projection = 0.0f, input = 0.0f;
};

__device__ __forceinline__ void leave(float* partials, int64_t part, int channels, int channel,
                                      Sums const& sums) {
  float* const own = partials + part * kSums * channels + channel;
  own[0] = sums.grad;
  own[channels] = sums.projection;
  own[2 * channels] = sums.input;
}

template <class T>
Tensors<T> tensors_of(GroupNormProblem const& p, GradientTensors const& given) {
  return {.input = static_cast<T const*>(given.input),
          .grad = static_cast<T const*>(given.grad_output),
          .output = static_cast<T*>(given.grad_input),
          .partials = given.partials,
          .affine = groupnorm::affine_of(p, given.weight, given.bias, nullptr),
          .eps = float(p.eps)};
}

// Whether accesses of `vector` elements may run along an axis of `extent`.
inline bool serves(GroupNormProblem const& p, GradientTensors const& t, int64_t extent,
                   int vector) {
  int64_t const bytes = vector * size_of(p.dtype);
  return extent % vector == 0 && device::is_aligned(t.input, bytes) &&
         device::is_aligned(t.grad_output, bytes) && device::is_aligned(t.grad_input, bytes);
}

}  // namespace fusedconv::ungrouped
