// Activations of values in registers, in quick forms where results are rounded to 16 bits.
#pragma once

#include <cuda_bf16.h>

#include <type_traits>

#include "fusedconv/activation.hpp"

namespace fusedconv::conv {

// GELU as its quick form has it, by a polynomial of degree three (least maximum error): within
// 5.5e-5 of the erf form, where the rounding of results to bfloat16 leaves 2^-9 of them.
struct RoughGelu {
  __device__ __forceinline__ static float value(float x) {
    float const a = fabsf(device::minimum(x, 1e30f));
    float h = -0.0248856165f;
    h = fmaf(h, a, -0.498820066f);
    h = fmaf(h, a, -1.12924590f);
    h = fmaf(h, a, -1.00353169f);
    return fmaf(-a, device::quick_exp2(h), device::maximum(x, 0.0f));
  }
};

// Of results of type T, by an activation that is known when compiled.
template <class T, class Form>
__device__ __forceinline__ float activated(float value) {
  if constexpr (std::is_same_v<T, __nv_bfloat16> && std::is_same_v<Form, activations::Gelu>) {
    return RoughGelu::value(value);
  } else {
    return sizeof(T) == 2 ? device::quick_value<Form>(value) : Form::value(value);
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
