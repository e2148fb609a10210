// What every normalising kernel does to one value: activation, affine map of its channel,
// activation.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/math.hpp"
#include "fusedconv/groupnorm.hpp"
#include "groupnorm/by_call.hpp"
#include "groupnorm/statistics.hpp"

namespace fusedconv::groupnorm {

// What a kernel knows of the activations when it is compiled: that there are none, that there may
// be any, which it calls, or the only one, in front or behind, GELU and SiLU in their quick forms:
// calls would take longer than memory there. GELU in front and SiLU behind are known in their
// own forms too. Kernels that know the first two alone take a bool.
enum KnownActivations : int {
  kNoActivation = false,
  kAnyActivation = true,
  kQuickGeluBefore,
  kQuickGeluAfter,
  kQuickSiluBefore,
  kQuickSiluAfter,
  kReluBefore,
  kReluAfter,
  kGeluBefore,
  kSiluAfter
};

inline KnownActivations known_activations(GroupNormProblem const& p) {
  bool const first = p.activation_before != Activation::kIdentity;
  bool const last = p.activation_after != Activation::kIdentity;
  if (!first && !last) return kNoActivation;
  if (first && last) return kAnyActivation;
  switch (first ? p.activation_before : p.activation_after) {
    case Activation::kRelu: return first ? kReluBefore : kReluAfter;
    case Activation::kGelu:
      if (p.quick()) return first ? kQuickGeluBefore : kQuickGeluAfter;
      if (first) return kGeluBefore;
      break;
    case Activation::kSilu:
      if (p.quick()) return first ? kQuickSiluBefore : kQuickSiluAfter;
      if (!first) return kSiluAfter;
      break;
    default: break;
  }
  return kAnyActivation;
}

// The activation that a kernel knows, in front or behind, void where that is none or any, and
// whether it takes its quick form.
template <class Before_, class After_, bool kQuick_ = true>
struct KnownForms {
  using Before = Before_;
  using After = After_;
  static constexpr bool kQuick = kQuick_;
};
template <int kKnown>
struct Known : KnownForms<void, void> {};
template <>
struct Known<kQuickGeluBefore> : KnownForms<activations::Gelu, void> {};
template <>
struct Known<kQuickGeluAfter> : KnownForms<void, activations::Gelu> {};
template <>
struct Known<kQuickSiluBefore> : KnownForms<activations::Silu, void> {};
template <>
struct Known<kQuickSiluAfter> : KnownForms<void, activations::Silu> {};
template <>
struct Known<kReluBefore> : KnownForms<activations::Relu, void> {};
template <>
struct Known<kReluAfter> : KnownForms<void, activations::Relu> {};
template <>
struct Known<kGeluBefore> : KnownForms<activations::Gelu, void, false> {};
template <>
struct Known<kSiluAfter> : KnownForms<void, activations::Silu, false> {};

// The activation in front, and whether it may be of a quick form.
struct Front {
  Activation activation;
  bool quick;
};

// Without kActivate both activations are the identity and cost nothing. Moments are of the values
// that are normalised, and gradients go back to: of the same form.
template <bool kActivate>
__device__ __forceinline__ float before(Front const& front, float x) {
  if constexpr (kActivate) {
    float values[1] = {x};
    activate_by_call(front.activation, front.quick, values);
    return values[0];
  } else {
    return x;
  }
}

struct Affine {
  Statistics const* statistics;  // by sample and group; null: those of the identity
  void const* weight;
  void const* bias;
  DType dtype;
  int channels;
  int groups;
  int channels_per_group;
  Activation activation_before;
  Activation activation_after;
  bool quick;  // whether activations may be of quick forms

  __device__ __forceinline__ Front front() const { return {activation_before, quick}; }
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
    if (channel >= affine.channels) return {};
    if (affine.statistics == nullptr) {
      return {0.0f, weight_of(affine, channel), bias_of(affine, channel)};
    }
    int64_t const group = sample * affine.groups + channel / affine.channels_per_group;
    return of(affine, affine.statistics[group], channel);
  }
};

template <class Form, bool kQuick = true, int kCount>
__device__ __forceinline__ void apply(float (&values)[kCount]) {
#pragma unroll
  for (float& value : values) {
    value = kQuick ? device::quick_value<Form>(value) : Form::value(value);
  }
}

// The activation in front.
template <int kKnown, int kCount>
__device__ __forceinline__ void activate(Activation activation, bool quick,
                                         float (&values)[kCount]) {
  using Form = typename Known<kKnown>::Before;
  if constexpr (!std::is_void_v<Form>) {
    apply<Form, Known<kKnown>::kQuick>(values);
  } else if constexpr (kKnown == kAnyActivation) {
    activate_by_call(activation, quick, values);
  }
}

// The same where the group's moments are of these values, or gradients of such: that quick GELU
// makes NaN of infinity here does not matter, whose group's deviations are NaN anyway.
template <int kKnown, int kCount>
__device__ __forceinline__ void activate_in_front(Affine const& affine, float (&values)[kCount]) {
  if constexpr (kKnown == kQuickGeluBefore) {
    using activations::Gelu;
#pragma unroll
    for (float& x : values) {
      float const a = fabsf(x);
      x = fmaf(-a, device::quick_exp2(Gelu::quick_log2_tail(a)), device::maximum(x, 0.0f));
    }
  } else {
    activate<kKnown>(affine.activation_before, affine.quick, values);
  }
}

// The one behind.
template <int kKnown, int kCount>
__device__ __forceinline__ void activate_after(Affine const& affine, float (&values)[kCount]) {
  using Form = typename Known<kKnown>::After;
  if constexpr (!std::is_void_v<Form>) {
    apply<Form, Known<kKnown>::kQuick>(values);
  } else if constexpr (kKnown == kAnyActivation) {
    activate_by_call(affine.activation_after, affine.quick, values);
  }
}

// Of values of one channel each: channel(i) is the i-th value's.
template <int kKnown, int kCount, class ChannelOf>
__device__ __forceinline__ void normalize_values(float (&values)[kCount], ChannelOf const& channel,
                                                 Affine const& affine) {
  activate<kKnown>(affine.activation_before, affine.quick, values);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    // Not in one operation with an activation's last product: what calls the activation has rounded
    // that, and a sample's bits would depend on which kernel its batch takes.
    float const deviation = __fsub_rn(values[i], channel(i).mean);
    values[i] = fmaf(deviation, channel(i).scale, channel(i).shift);
  }
  activate_after<kKnown>(affine, values);
}

template <int kKnown>
__device__ __forceinline__ float normalized(float x, ChannelAffine const& channel,
                                            Affine const& affine) {
  float value[1] = {x};
  normalize_values<kKnown>(value, [&](int) -> ChannelAffine const& { return channel; }, affine);
  return value[0];
}

template <class U, int kKnown, class T, int kVector, class ChannelOf>
__device__ __forceinline__ device::Pack<U, kVector> normalized_pack(
    device::Pack<T, kVector> const& pack, ChannelOf const& channel, Affine const& affine) {
  float values[kVector];
#pragma unroll
  for (int v = 0; v < kVector; ++v) values[v] = device::to_float(pack.values[v]);
  normalize_values<kKnown>(values, channel, affine);
  device::Pack<U, kVector> result;
#pragma unroll
  for (int v = 0; v < kVector; ++v) result.values[v] = device::from_float<U>(values[v]);
  return result;
}

// Of values of one channel.
template <class U, int kKnown, class T, int kVector>
__device__ __forceinline__ device::Pack<U, kVector> normalized_pack(
    device::Pack<T, kVector> const& pack, ChannelAffine const& channel, Affine const& affine) {
  return normalized_pack<U, kKnown>(
      pack, [&](int) -> ChannelAffine const& { return channel; }, affine);
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
