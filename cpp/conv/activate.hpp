// Activations of values in registers, in quick forms where results are rounded to 16 bits.
#pragma once

#include "fusedconv/activation.hpp"

namespace fusedconv::conv {

// Of results of type T, by an activation that is known when compiled.
template <class T, class Form>
__device__ __forceinline__ float activated(float value) {
  return sizeof(T) == 2 ? device::quick_value<Form>(value) : Form::value(value);
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
