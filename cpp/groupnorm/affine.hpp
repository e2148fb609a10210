// What every normalising kernel does to one value: activation, affine map of its channel,
// activation.
#pragma once

#include <cstdint>

#include "cuda/math.hpp"
#include "fusedconv/groupnorm.hpp"
#include "groupnorm/by_call.hpp"
#include "groupnorm/statistics.hpp"

namespace fusedconv::groupnorm {

// What a kernel knows of the activations when it is compiled: that there are none, that there may
// be any, which it calls, or that there is GELU in its quick form in front and none behind: calls
// would take longer than memory there. Kernels that know the first two alone take a bool.
enum KnownActivations : int { kNoActivation = false, kAnyActivation = true, kQuickGeluBefore };

inline bool has_quick_gelu_before(GroupNormProblem const& p) {
  return p.quick() && p.activation_before == Activation::kGelu &&
         p.activation_after == Activation::kIdentity;
}

// Without kActivate both activations are the identity and cost nothing.
template <bool kActivate>
__device__ __forceinline__ float before(Activation activation, float x) {
  if constexpr (kActivate) {
    return activation == Activation::kIdentity ? x : device::activate_by_call(activation, x);
  } else {
    return x;
  }
}

struct Affine {
  Statistics const* statistics;  // by sample and group; null: no normalisation
  void const* weight;
  void const* bias;
  DType dtype;
  int channels;
  int groups;
  int channels_per_group;
  Activation activation_before;
  Activation activation_after;
  bool quick;  // whether activations may be of quick forms
};

// A channel's weight and bias, those of the identity where they are absent.
__device__ __forceinline__ float weight_of(Affine const& affine, int channel) {
  return affine.weight ? device::load_as_float(affine.weight, channel, affine.dtype) : 1.0f;
}
__device__ __forceinline__ float bias_of(Affine const& affine, int channel) {
  return affine.bias ? device::load_as_float(affine.bias, channel, affine.dtype) : 0.0f;
}

// y = (x - mean) * scale + shift of one channel of one sample. The mean is subtracted first, so
// that a large mean costs no precision; its low part is in the shift.
struct ChannelAffine {
  float mean = 0.0f;
  float scale = 1.0f;
  float shift = 0.0f;

  __device__ __forceinline__ static ChannelAffine of(Statistics const& group, float weight,
                                                     float bias) {
    float const scale = group.rstd * weight;
    return {group.mean, scale, fmaf(-group.low, scale, bias)};
  }

  __device__ __forceinline__ static ChannelAffine of(Affine const& affine, Statistics const& group,
                                                     int channel) {
    return of(group, weight_of(affine, channel), bias_of(affine, channel));
  }

  __device__ __forceinline__ static ChannelAffine of(Affine const& affine, int64_t sample,
                                                     int channel) {
    if (channel >= affine.channels || affine.statistics == nullptr) return {};
    int64_t const group = sample * affine.groups + channel / affine.channels_per_group;
    return of(affine, affine.statistics[group], channel);
  }
};

// In the forms that normalized_pack() takes, so that a value's bits do not depend on its place.
template <bool kActivate>
__device__ __forceinline__ float normalized(float x, ChannelAffine const& channel,
                                            Affine const& affine) {
  float value[1] = {x};
  if constexpr (kActivate) activate_by_call(affine.activation_before, affine.quick, value);
  value[0] = fmaf(value[0] - channel.mean, channel.scale, channel.shift);
  if constexpr (kActivate) activate_by_call(affine.activation_after, affine.quick, value);
  return value[0];
}

// The activation in front.
template <int kKnown, int kCount>
__device__ __forceinline__ void activate(Activation activation, bool quick,
                                         float (&values)[kCount]) {
  if constexpr (kKnown == kQuickGeluBefore) {
#pragma unroll
    for (float& value : values) value = device::quick_value<activations::Gelu>(value);
  } else if constexpr (kKnown == kAnyActivation) {
    activate_by_call(activation, quick, values);
  }
}

// Of values of one channel.
template <class U, int kKnown, class T, int kVector>
__device__ __forceinline__ device::Pack<U, kVector> normalized_pack(
    device::Pack<T, kVector> const& pack, ChannelAffine const& channel, Affine const& affine) {
  float values[kVector];
#pragma unroll
  for (int v = 0; v < kVector; ++v) values[v] = device::to_float(pack.values[v]);
  activate<kKnown>(affine.activation_before, affine.quick, values);
#pragma unroll
  for (float& value : values) value = fmaf(value - channel.mean, channel.scale, channel.shift);
  if constexpr (kKnown == kAnyActivation) {
    activate_by_call(affine.activation_after, affine.quick, values);
  }
  device::Pack<U, kVector> result;
#pragma unroll
  for (int v = 0; v < kVector; ++v) result.values[v] = device::from_float<U>(values[v]);
  return result;
}

inline Affine affine_of(GroupNormProblem const& p, void const* weight, void const* bias,
                        Statistics const* statistics) {
  return Affine{.statistics = statistics,
                .weight = weight,
                .bias = bias,
                .dtype = p.affine_dtype,
                .channels = int(p.channels),
                .groups = int(p.groups),
                .channels_per_group = int(p.channels_per_group()),
                .activation_before = p.activation_before,
                .activation_after = p.activation_after,
                .quick = p.quick()};
}

}  // namespace fusedconv::groupnorm
