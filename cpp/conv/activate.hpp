// Activations of values in registers, in quick forms where results are rounded to 16 bits.
#pragma once

#include <cuda_bf16.h>

#include <type_traits>

#include "fusedconv/activation.hpp"

namespace fusedconv::conv {

// Of results of type T, by an activation that is known when compiled.
template <class T, class Form>
__device__ __forceinline__ float activated(float value) {
  return sizeof(T) == 2 ? device::quick_value<Form>(value) : Form::value(value);
}

// activations::Gelu::quick() with a polynomial of degree three, which leaves less than roundings to
// bfloat16 do (Lawson's weights, of the error over what is allowed): within 2.4e-4 of the erf form,
// 0.06 % of results of |x| < 0.5, 0.11 % of |x| < 1.5 and 1e-5 + 0.9 % of all. Rounding adds up to
// 0.39 %.
__device__ __forceinline__ float rough_gelu(float x) {
  float const a = fabsf(device::minimum(x, 1e30f));
  float h = fmaf(-0.0242205165f, a, -0.495386521f);
  h = fmaf(h, a, -1.13714444f);
  h = fmaf(h, a, -1.00082633f);
  return fmaf(-a, device::quick_exp2(h), device::maximum(x, 0.0f));
}

// Of values that are rounded to T and stored: what is normalised behind reads them there. Moments
// in an epilogue are of quick forms, by which other kernels may compute the same values again.
template <class T, class Form>
__device__ __forceinline__ float last_activated(float value) {
  if constexpr (std::is_same_v<T, __nv_bfloat16> && std::is_same_v<Form, activations::Gelu>) {
    return rough_gelu(value);
  } else {
    return device::quick_value<Form>(value);
  }
}

template <class T, class Form>
__device__ __forceinline__ void activate_each(float& value) {
  value = activated<T, Form>(value);
}
template <class T, class Form, class Values, int kCount>
__device__ __forceinline__ void activate_each(Values (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) activate_each<T, Form>(values[i]);
}

// values: an array of floats, or of such arrays.
template <class T, class Values>
__device__ __forceinline__ void activate(Activation activation, Values& values) {
  if (activation == Activation::kIdentity) return;
  dispatch_activation(activation, [&](auto form) { activate_each<T, decltype(form)>(values); });
}

}  // namespace fusedconv::conv
