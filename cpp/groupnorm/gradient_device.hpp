// What every gradient kernel does to one value and to partial sums.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/math.hpp"
#include "cuda/tile.hpp"
#include "groupnorm/affine.hpp"
#include "groupnorm/by_call.hpp"
#include "groupnorm/gradient.hpp"
#include "groupnorm/launch.hpp"
#include "groupnorm/support.hpp"

namespace fusedconv::groupnorm {

template <int kCount>
static __device__ __noinline__ Lanes<kCount> slopes_by_call(Activation activation, bool quick,
                                                            Lanes<kCount> x) {
  dispatch_activation(activation, [&](auto form) {
    using Form = decltype(form);
    if (quick) {
#pragma unroll
      for (float& value : x.v) value = device::quick_slope<Form>(value);
    } else {
#pragma unroll
      for (float& value : x.v) value = Form::slope(value);
    }
  });
  return x;
}

// With the forward pass's statistics as it saved them, [batch, groups] each.
struct GradientAffine : Affine {
  float const* mean;
  float const* rstd;
};

inline GradientAffine gradient_affine_of(GroupNormProblem const& p,
                                         GradientTensors const& tensors) {
  return {affine_of(p, tensors.weight, tensors.bias, nullptr), tensors.mean, tensors.rstd};
}

// One channel of one sample.
struct Channel {
  float mean;
  float rstd;
  float weight;
  float bias;

  __device__ __forceinline__ static Channel of(GradientAffine const& affine, int64_t sample,
                                               int channel) {
    int64_t const group = sample * affine.groups + channel / affine.channels_per_group;
    return {affine.mean[group], affine.rstd[group], weight_of(affine, channel),
            bias_of(affine, channel)};
  }
};

// xhat, and the gradient that reaches the affine map's output.
struct Point {
  float normalized;
  float gradient;
};

// The gradient of an activation's value to that of the point that it was computed of. What a ReLU
// stops is zero whatever comes, as torch has it; where the activation is called it is a product
// with zero, as its slope is what is known there.
template <class Form>
__device__ __forceinline__ float through(float point, float grad) {
  if constexpr (std::is_same_v<Form, activations::Relu>) {
    return point <= 0.0f ? 0.0f : grad;
  } else {
    return grad * device::quick_slope<Form>(point);
  }
}

// Of values of one channel each: channel(i) is the i-th value's.
template <int kKnown, class T, class G, int kCount, class ChannelOf>
__device__ __forceinline__ void points_of(device::Pack<T, kCount> const& x,
                                          device::Pack<G, kCount> const& grad,
                                          ChannelOf const& channel, GradientAffine const& affine,
                                          Point (&points)[kCount]) {
  float values[kCount], gradients[kCount];
  x.to_floats(values);
  grad.to_floats(gradients);
  activate_in_front<kKnown>(affine, values);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    points[i] = {(values[i] - channel(i).mean) * channel(i).rstd, gradients[i]};
  }
  using Form = typename Known<kKnown>::After;
  if constexpr (!std::is_void_v<Form>) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float const point = fmaf(points[i].normalized, channel(i).weight, channel(i).bias);
      points[i].gradient = through<Form>(point, points[i].gradient);
    }
  } else if constexpr (kKnown == kAnyActivation) {
    if (affine.activation_after != Activation::kIdentity) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        values[i] = fmaf(points[i].normalized, channel(i).weight, channel(i).bias);
      }
      apply_by_call(values, [&](auto lanes) {
        return slopes_by_call(affine.activation_after, affine.quick, lanes);
      });
#pragma unroll
      for (int i = 0; i < kCount; ++i) points[i].gradient *= values[i];
    }
  }
}

// The gradient of what is normalised, of the normalised value's distance from the mean and of the
// gradient that reaches the affine map's output: constants of a channel, and a group's terms.
struct GradientMap {
  float of_gradient, of_distance, shift;

  __device__ __forceinline__ GradientMap(Channel const& channel, GroupTerms const& terms)
      : of_gradient(channel.rstd * channel.weight),
        of_distance(-channel.rstd * channel.rstd * terms.projection),
        shift(-channel.rstd * terms.gradient) {}

  __device__ __forceinline__ float operator()(float gradient, float distance) const {
    return fmaf(of_gradient, gradient, fmaf(of_distance, distance, shift));
  }

  // The map of the normalised value itself. What that loses is as little as 2^-24 means, of which
  // values of 16 bits resolve 2^-11.
  __device__ __forceinline__ GradientMap of_value(float mean) const {
    GradientMap result = *this;
    result.shift = fmaf(-of_distance, mean, shift);
    return result;
  }
};

// A value and slope of an activation in a quick form, for a gradient that is rounded to T. What
// GELU's Phi(-a) = 2^P(a) is off with a P of degree three, 7.5e-5, is a fiftieth of what rounding
// to bfloat16 may take from a slope of one.
template <class T, class Form>
__device__ __forceinline__ void value_and_slope(float x, float& value, float& slope) {
  if constexpr (std::is_same_v<T, __nv_bfloat16> && std::is_same_v<Form, activations::Gelu>) {
    float const a = fabsf(x);
    float h = fmaf(-0.0314121693f, a, -0.478946835f);
    h = fmaf(h, a, -1.14558601f);
    activations::Gelu::both_by(fmaf(h, a, -1.00021672f), x, value, slope);
  } else {
    device::quick_both<Form>(x, value, slope);
  }
}

// Before rounding. terms(i): those of the i-th value's group.
template <int kKnown, class T, class G, int kCount, class ChannelOf, class TermsOf>
__device__ __forceinline__ void grad_inputs_of(device::Pack<T, kCount> const& x,
                                               device::Pack<G, kCount> const& grad,
                                               ChannelOf const& channel, TermsOf const& terms,
                                               GradientAffine const& affine,
                                               float (&results)[kCount]) {
  using Before = typename Known<kKnown>::Before;
  constexpr bool kBehind = !std::is_void_v<typename Known<kKnown>::After>;
  if constexpr (kKnown != kAnyActivation && !kBehind) {
    float inputs[kCount], gradients[kCount];
    x.to_floats(inputs);
    grad.to_floats(gradients);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float const point = inputs[i];
      GradientMap const map(channel(i), terms(i));
      float value = point;
      [[maybe_unused]] float slope = 1.0f;
      if constexpr (!Known<kKnown>::kQuick) {
        Before::both(point, value, slope);
      } else if constexpr (!std::is_void_v<Before>) {
        value_and_slope<T, Before>(point, value, slope);
      }
      float reached;
      if constexpr (sizeof(T) == 2) {
        reached = map.of_value(channel(i).mean)(gradients[i], value);
      } else {
        reached = map(gradients[i], value - channel(i).mean);
      }
      if constexpr (std::is_same_v<Before, activations::Relu>) {
        reached = through<Before>(point, reached);
      } else if constexpr (!std::is_void_v<Before>) {
        reached *= slope;
      }
      results[i] = reached;
    }
    return;
  }
  Point points[kCount];
  points_of<kKnown>(x, grad, channel, affine, points);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    results[i] =
        channel(i).rstd * (fmaf(channel(i).weight, points[i].gradient, -terms(i).gradient) -
                           points[i].normalized * terms(i).projection);
  }
  if constexpr (kKnown == kAnyActivation) {
    if (affine.activation_before != Activation::kIdentity) {
      float slopes[kCount];
      x.to_floats(slopes);
      apply_by_call(slopes, [&](auto lanes) {
        return slopes_by_call(affine.activation_before, affine.quick, lanes);
      });
#pragma unroll
      for (int i = 0; i < kCount; ++i) results[i] *= slopes[i];
    }
  }
}

template <int kKnown, class T, class G, int kCount, class ChannelOf, class TermsOf>
__device__ __forceinline__ device::Pack<T, kCount> grad_input_of(
    device::Pack<T, kCount> const& x, device::Pack<G, kCount> const& grad, ChannelOf const& channel,
    TermsOf const& terms, GradientAffine const& affine) {
  float results[kCount];
  grad_inputs_of<kKnown>(x, grad, channel, terms, affine, results);
  return device::Pack<T, kCount>::of(results);
}

__device__ __forceinline__ float2 warp_sum(float2 value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    value.x += __shfl_down_sync(~0u, value.x, offset);
    value.y += __shfl_down_sync(~0u, value.y, offset);
  }
  return value;
}

// The elements of a run, which begins `first` elements behind an aligned address, in vectors from
// the first aligned one on; those before and behind go one by one.
template <int kVector>
struct AlignedRun {
  int64_t head, vectors;
  int singles;  // before and behind

  __device__ __forceinline__ AlignedRun(int64_t first, int64_t size)
      : head(min(size, int64_t(kVector - 1) - (first + kVector - 1) % kVector)),
        vectors((size - head) / kVector),
        singles(int(size - vectors * kVector)) {}
  // The run's element that is the i-th of these.
  __device__ __forceinline__ int64_t single(int i) const {
    return i < head ? i : i + vectors * kVector;
  }
};

// Calls body(T{}, G{}, whether there is any activation), the last as a type: T is the problem's
// dtype, G that of the output's gradient.
template <class F>
void dispatch_gradient_kernel(GroupNormProblem const& p, F&& body) {
  dispatch_kernel(p, [&](auto zero, auto active) {
    if constexpr (sizeof(zero) == 2) {
      if (has_wide_gradient(p)) return body(zero, float{}, active);
    }
    body(zero, zero, active);
  });
}

// Calls body with the widest vector that serves input, gradient and result: they have one shape.
// aligns: planes are gone over by AlignedRun, wherever they begin.
template <class T, class G, class F>
void dispatch_gradient_vector(GroupNormProblem const& p, GradientTensors const& tensors,
                              bool aligns, F&& body) {
  bool const last = p.input_layout == Layout::kChannelsLast;
  // As far as that of the gradient serves vectors of as many elements.
  auto const addresses =
      reinterpret_cast<uintptr_t>(tensors.input) |
      reinterpret_cast<uintptr_t>(tensors.grad_output) / (sizeof(G) / sizeof(T)) |
      reinterpret_cast<uintptr_t>(tensors.grad_input);
  int64_t const extent = last ? p.channels : aligns ? int64_t(16 / sizeof(T)) : p.pixels;
  device::dispatch_vector<T>(reinterpret_cast<void const*>(addresses), extent, body);
}

// Calls body with that and what a kernel is to know of activations: more than whether there are any
// where accesses are of 16 bytes.
template <class T, class G, bool kActivate, class F>
void dispatch_gradients(GroupNormProblem const& p, GradientTensors const& tensors, bool aligns,
                        F&& body) {
  dispatch_gradient_vector<T, G>(p, tensors, aligns, [&](auto vector) {
    if constexpr (vector.value * sizeof(T) == 16) {
      dispatch_known<kActivate, kQuickGeluBefore, kQuickGeluAfter, kQuickSiluBefore,
                     kQuickSiluAfter, kReluBefore, kReluAfter>(
          p, [&](auto known) { body(vector, known); });
    } else {
      body(vector, std::integral_constant<int, kActivate>{});
    }
  });
}

}  // namespace fusedconv::groupnorm
