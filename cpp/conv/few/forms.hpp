// What a kernel knows of the activations when it is compiled.
#pragma once

#include "fusedconv/activation.hpp"

namespace fusedconv::conv::few {

// The one in front where none is behind, in its quick form: jumps over what others would be wait
// for instructions longer than most of them take.
template <class Form>
struct Before {
  static constexpr float kScale = 1.0f;  // of what is activated, in the products' sums
  static constexpr bool kMayRound = true;
  __device__ __forceinline__ static float value(float x) { return device::quick_value<Form>(x); }
};

// SiLU of what is normalised in bfloat16, of one special function in place of two: off by 2^-12 of
// |x| at most, where rounding x to bfloat16 would leave 2^-9. Of half of x, as sums are where
// weights and biases are halved, which rounds nothing.
struct RoughSilu {
  static constexpr float kScale = 0.5f;
  static constexpr bool kMayRound = false;  // sums, as those are rounded that are saved
  __device__ __forceinline__ static float value(float half) {
    float tanh;
    asm("tanh.approx.f32 %0, %1;" : "=f"(tanh) : "f"(half));
    return fmaf(half, tanh, half);
  }
};

// Any, in front and behind, by the launch's arguments.
struct Any {
  static constexpr float kScale = 1.0f;
  static constexpr bool kMayRound = true;
};

}  // namespace fusedconv::conv::few
