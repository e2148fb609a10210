// Activations of several values behind one call.
#pragma once

#include "cuda/math.hpp"
#include "fusedconv/activation.hpp"

namespace fusedconv::groupnorm {

template <int kCount>
struct Lanes {
  float v[kCount];
};

// Behind calls: kernels hold many values in registers, and each of their unrolled loops would hold
// every activation once per value. Several values in each: where memory could be the limit, a call
// for each value would take longer than all else.
template <int kCount>
static __device__ __noinline__ Lanes<kCount> values_by_call(Activation activation, bool quick,
                                                            Lanes<kCount> x) {
  dispatch_activation(activation, [&](auto form) {
    using Form = decltype(form);
    if (quick) {
#pragma unroll
      for (float& value : x.v) value = device::quick_value<Form>(value);
    } else {
#pragma unroll
      for (float& value : x.v) value = Form::value(value);
    }
  });
  return x;
}

// Replaces values by what a call of either kind makes of them, at most four at a time.
template <int kCount, class Call>
__device__ __forceinline__ void apply_by_call(float (&values)[kCount], Call&& call) {
  constexpr int kLanes = kCount < 4 ? kCount : 4;
  static_assert(kCount % kLanes == 0, "whole calls");
#pragma unroll
  for (int first = 0; first < kCount; first += kLanes) {
    Lanes<kLanes> lanes;
#pragma unroll
    for (int i = 0; i < kLanes; ++i) lanes.v[i] = values[first + i];
    lanes = call(lanes);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) values[first + i] = lanes.v[i];
  }
}

// Replaces values by their activations.
template <int kCount>
__device__ __forceinline__ void activate_by_call(Activation activation, bool quick,
                                                 float (&values)[kCount]) {
  if (activation == Activation::kIdentity) return;
  apply_by_call(values,
                [&](auto const& lanes) { return values_by_call(activation, quick, lanes); });
}

}  // namespace fusedconv::groupnorm
