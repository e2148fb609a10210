// GELU, its exact form, of pairs of bfloat16 in half precision: its error is a sixth of what
// rounding the result costs, the slope's a third. Beyond the range of half precision the value is
// no number, which sums of such values show.
#pragma once

#include <cstdint>

#include "cuda/math.hpp"

namespace fusedconv::groupnorm::halves {

// Two values of half precision.
using Pair = uint32_t;

__host__ __device__ constexpr Pair both(uint16_t bits) { return Pair(bits) << 16 | bits; }

__device__ __forceinline__ Pair fma(Pair a, Pair b, Pair c) {
  Pair result;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}
__device__ __forceinline__ Pair add(Pair a, Pair b) {
  Pair result;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}
__device__ __forceinline__ Pair subtract(Pair a, Pair b) {
  Pair result;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}
__device__ __forceinline__ Pair negative(Pair a) {
  Pair result;
  asm("neg.f16x2 %0, %1;" : "=r"(result) : "r"(a));
  return result;
}
__device__ __forceinline__ Pair magnitude(Pair a) {
  Pair result;
  asm("abs.f16x2 %0, %1;" : "=r"(result) : "r"(a));
  return result;
}
__device__ __forceinline__ Pair minimum(Pair a, Pair b) {
  Pair result;
  asm("min.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}
// Zero where it is below, NaN where that is.
__device__ __forceinline__ Pair above_zero(Pair a) {
  Pair result;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(0));
  return result;
}
__device__ __forceinline__ Pair exp2(Pair a) {
  Pair result;
  asm("ex2.approx.f16x2 %0, %1;" : "=r"(result) : "r"(a));
  return result;
}

// Two of bfloat16. Those beyond the range become infinite.
__device__ __forceinline__ Pair of_bfloat16(uint32_t pair) {
  float2 const values = device::to_pair<__nv_bfloat16>(pair);
  return device::from_pair<__half>(values.x, values.y);
}
__device__ __forceinline__ Pair of(float value) { return device::from_pair<__half>(value, value); }

// Phi(-a) = 2^P(a), where P has the least maximum error of a Phi(-a): 5.5e-5. All coefficients are
// below zero, so that large values need no bound.
__device__ __forceinline__ Pair gelu_tail(Pair a) {
  Pair h = fma(both(0xa65e), a, both(0xb7fb));  // -0.0248739392, -0.498853537
  h = fma(h, a, both(0xbc84));                  // -1.12921965
  return exp2(fma(h, a, both(0xbc04)));         // -1.00353675
}

// x Phi(x) = max(x, 0) - a Phi(-a) with a = |x|.
__device__ __forceinline__ Pair gelu(Pair x) {
  Pair const a = magnitude(x);
  return fma(negative(a), gelu_tail(a), above_zero(x));
}

// The same of finite values, and the slope: at -a that is Phi(-a) n(a), where n is smooth, at a
// what it lacks of 1. A polynomial of degree three (least maximum error with the tail above) keeps
// it within 3.5e-4.
__device__ __forceinline__ void gelu_and_slope(Pair x, Pair& value, Pair& slope) {
  Pair const a = minimum(magnitude(x), both(0x4800));  // 8, where Phi(-a) is zero
  Pair const minus_tail = negative(gelu_tail(a));
  value = fma(a, minus_tail, above_zero(x));
  Pair n = fma(both(0xaba7), a, both(0xb95e));  // -0.059786, -0.670812
  n = fma(n, a, both(0xba5e));                  // -0.796128
  n = fma(n, a, both(0x3c02));                  // 1.001757
  constexpr Pair kHalf = both(0x3800), kSigns = both(0x8000);
  // Of the sign of x, by which it is off a half.
  slope = add(fma(minus_tail, n, kHalf) ^ (x & kSigns), kHalf);
}

}  // namespace fusedconv::groupnorm::halves
