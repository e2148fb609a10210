// What every gradient kernel does to one value and to partial sums.
#pragma once

#include <cstdint>

#include "cuda/math.hpp"
#include "cuda/tile.hpp"
#include "groupnorm/affine.hpp"
#include "groupnorm/gradient.hpp"

namespace fusedconv::groupnorm {

// Behind a call for the reason that activate_by_call has.
static __device__ __noinline__ float slope_by_call(Activation activation, float x) {
  return device::slope(activation, x);
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

template <bool kActivate>
__device__ __forceinline__ Point point_of(float x, float grad, Channel const& channel,
                                          Affine const& affine) {
  float const a = before<kActivate>(affine.activation_before, x);
  Point point{(a - channel.mean) * channel.rstd, grad};
  if constexpr (kActivate) {
    if (affine.activation_after != Activation::kIdentity) {
      point.gradient *= slope_by_call(affine.activation_after,
                                      fmaf(point.normalized, channel.weight, channel.bias));
    }
  }
  return point;
}

template <bool kActivate>
__device__ __forceinline__ float grad_input_of(float x, float grad, Channel const& channel,
                                               GroupTerms const& terms, Affine const& affine) {
  Point const point = point_of<kActivate>(x, grad, channel, affine);
  float result = channel.rstd * (fmaf(channel.weight, point.gradient, -terms.gradient) -
                                 point.normalized * terms.projection);
  if constexpr (kActivate) {
    if (affine.activation_before != Activation::kIdentity) {
      result *= slope_by_call(affine.activation_before, x);
    }
  }
  return result;
}

__device__ __forceinline__ float2 warp_sum(float2 value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    value.x += __shfl_down_sync(~0u, value.x, offset);
    value.y += __shfl_down_sync(~0u, value.y, offset);
  }
  return value;
}

// Calls body with the widest vector that serves input, gradient and result: they have one shape.
template <class T, class F>
void dispatch_gradient_vector(GroupNormProblem const& p, GradientTensors const& tensors, F&& body) {
  bool const last = p.input_layout == Layout::kChannelsLast;
  auto const addresses = reinterpret_cast<uintptr_t>(tensors.input) |
                         reinterpret_cast<uintptr_t>(tensors.grad_output) |
                         reinterpret_cast<uintptr_t>(tensors.grad_input);
  device::dispatch_vector<T>(reinterpret_cast<void const*>(addresses), last ? p.channels : p.pixels,
                             body);
}

}  // namespace fusedconv::groupnorm
