// GELU, its exact form, of pairs of bfloat16 in half precision. By emulation an activated and
// normalised result, rounded, is off by 0.3 to 1.03 of what bfloat16 between the two costs, for
// means from -3 to 3 and deviations from 1e-3 to 3. Beyond the range of half precision the value is
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

// Phi(-a) = 2^P(a). P, a polynomial of degree four with P(0) = -1, weighs its error by a power of
// Phi(-a), between that of the value and that relative to it. It rises again beyond 8, where
// Phi(-a) is zero.
__device__ __forceinline__ Pair gelu_tail(Pair a) {
  a = minimum(a, both(0x4800));
  Pair h = fma(both(0x19b8), a, both(0xa8f5));  // 0.00279236, -0.0387268
  h = fma(h, a, both(0xb79b));                  // -0.4753418
  h = fma(h, a, both(0xbc95));                  // -1.1455078
  return exp2(fma(h, a, both(0xbc00)));         // -1
}

// x Phi(x) = max(x, 0) - a Phi(-a) with a = |x|, no number where that is infinite.
__device__ __forceinline__ Pair gelu(Pair x) {
  Pair const a = magnitude(x);
  return fma(negative(a), gelu_tail(a), above_zero(x));
}

}  // namespace fusedconv::groupnorm::halves
