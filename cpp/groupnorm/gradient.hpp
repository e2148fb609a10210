// What every gradient kernel does to one value and to partial sums.
#pragma once

#include <cstdint>

#include "cuda/math.hpp"
#include "groupnorm/affine.hpp"
#include "groupnorm/backward.hpp"

namespace fusedconv::groupnorm {

// The derivative of an activation; behind a call for the reason that activate_by_call has.
static __device__ __noinline__ float slope_by_call(Activation activation, float x) {
  switch (activation) {
    case Activation::kIdentity: return 1.0f;
    case Activation::kRelu: return x <= 0.0f ? 0.0f : 1.0f;
    case Activation::kGelu: {
      float const density = 0.39894228040143267794f * expf(-0.5f * x * x);
      return fmaf(x, density, 0.5f * (1.0f + erff(x * 0.70710678118654752440f)));
    }
    case Activation::kGeluTanh: {
      constexpr float kScale = 0.79788456080286535588f;
      float const t = tanhf(kScale * fmaf(0.044715f * x * x, x, x));
      return 0.5f * (1.0f + t) +
             0.5f * x * (1.0f - t * t) * kScale * fmaf(3.0f * 0.044715f * x, x, 1.0f);
    }
    case Activation::kSilu: {
      float const logistic = 1.0f / (1.0f + expf(-x));
      return logistic * fmaf(x, 1.0f - logistic, 1.0f);
    }
  }
  return 1.0f;
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
    return {affine.mean[group], affine.rstd[group],
            affine.weight ? device::load_as_float(affine.weight, channel, affine.dtype) : 1.0f,
            affine.bias ? device::load_as_float(affine.bias, channel, affine.dtype) : 0.0f};
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

// mean(weight g) and mean(weight g xhat) of a group.
struct GroupTerms {
  float gradient;
  float projection;
};

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

}  // namespace fusedconv::groupnorm
