// What every gradient kernel does to one value and to partial sums.
#pragma once

#include <cstdint>

#include "cuda/math.hpp"
#include "cuda/tile.hpp"
#include "groupnorm/affine.hpp"
#include "groupnorm/gradient.hpp"
#include "groupnorm/partition.hpp"

namespace fusedconv::groupnorm {

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
      point.gradient *= device::slope_by_call(affine.activation_after,
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
      result *= device::slope_by_call(affine.activation_before, x);
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

// Calls body(index, vector of x, vector of g) for the thread's share of a block's vectors, with
// several loads in flight.
template <class T, int kVector, class Body>
__device__ __forceinline__ void for_each_vector(T const* x, T const* g, int64_t vectors,
                                                Body const& body) {
  using Pack = device::Pack<T, kVector>;
  constexpr int kAhead = 2;
  int64_t i = threadIdx.x;
  for (; i + (kAhead - 1) * kThreads < vectors; i += kAhead * kThreads) {
    Pack px[kAhead];
    Pack pg[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      px[j] = Pack::load(x + (i + j * kThreads) * kVector);
      pg[j] = Pack::load(g + (i + j * kThreads) * kVector);
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) body(i + j * kThreads, px[j], pg[j]);
  }
  for (; i < vectors; i += kThreads) {
    body(i, Pack::load(x + i * kVector), Pack::load(g + i * kVector));
  }
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
