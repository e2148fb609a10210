// Everything that an activation is: its code and name, its value on the processor and on the GPU,
// its slope. A new one is a code, a struct, a case and an entry of the list, all of them
// here.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>

#include "fusedconv/types.hpp"

// Loops over elements vectorise, and their clones for wider instruction sets do not share baseline
// code, only where all that they call is inlined.
#define FUSEDCONV_INLINE inline __attribute__((always_inline))

namespace fusedconv {

enum class Activation : int { kIdentity, kRelu, kGelu, kGeluTanh, kSilu };

namespace host {

// condition ? a : b. Written with ?:, a computation sinks into the arm that needs it and becomes a
// branch, as floating-point arithmetic may trap: then only AVX-512 vectorises.
FUSEDCONV_INLINE uint32_t select(bool condition, uint32_t a, uint32_t b) {
  uint32_t const mask = 0u - static_cast<uint32_t>(condition);
  return (a & mask) | (b & ~mask);
}

FUSEDCONV_INLINE float select(bool condition, float a, float b) {
  return std::bit_cast<float>(
      select(condition, std::bit_cast<uint32_t>(a), std::bit_cast<uint32_t>(b)));
}

// Relative error 2e-7; 0 below -87, where the result would leave the normal range.
FUSEDCONV_INLINE float exp_of_nonpositive(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  float const bounded = select(x < -87.0f, -87.0f, x);
  float const shifted = bounded * 1.44269504f + kRound;
  float const n = shifted - kRound;
  // ln 2 in two parts; the first has 17 bits, so that n times it is exact.
  float const r = (bounded - n * 0.693145751953125f) - n * 1.42860677e-6f;
  // (e^r - 1 - r) / r^2 interpolated at the Chebyshev nodes of |r| <= ln(2) / 2.
  float const p = 0.5f + r * (0.1666657338f +
                              r * (0.04166655011f + r * (0.008363773874f + r * 0.001392692661f)));
  float const mantissa = 1.0f + (r + r * r * p);
  float const scale = std::bit_cast<float>((std::bit_cast<uint32_t>(shifted) << 23) + 0x3f800000u);
  return select(x < -87.0f, 0.0f, mantissa * scale);
}

// x / (1 + exp(-u)).
FUSEDCONV_INLINE float times_logistic(float x, float u) {
  float const e = exp_of_nonpositive(-std::fabs(u));
  return x * (select(u < 0.0f, e, 1.0f) / (1.0f + e));
}

}  // namespace host

#ifdef __CUDACC__
namespace device {

// exp2 and reciprocal to two units in the last place; denormal results are zero.
__device__ __forceinline__ float quick_exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
__device__ __forceinline__ float quick_reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

}  // namespace device
#endif

// One struct an activation. host(x): what loops of the processor inline. value(x): on the GPU.
// slope(x): its derivative there. quick(x), where there is one: a value that is off by less than
// the rounding of operands to TF32 or 16 bits.
namespace activations {

struct Identity {
  static constexpr Activation kCode = Activation::kIdentity;
  static constexpr char const* kName = "identity";
  FUSEDCONV_INLINE static float host(float x) { return x; }
#ifdef __CUDACC__
  __device__ __forceinline__ static float value(float x) { return x; }
  __device__ __forceinline__ static float slope(float) { return 1.0f; }
#endif
};

// Comparing instead of taking a maximum keeps NaN, as torch does.
struct Relu {
  static constexpr Activation kCode = Activation::kRelu;
  static constexpr char const* kName = "relu";
  FUSEDCONV_INLINE static float host(float x) { return host::select(x < 0.0f, 0.0f, x); }
#ifdef __CUDACC__
  __device__ __forceinline__ static float value(float x) { return x < 0.0f ? 0.0f : x; }
  __device__ __forceinline__ static float slope(float x) { return x <= 0.0f ? 0.0f : 1.0f; }
#endif
};

// x Phi(x) with Phi(x) = (1 + erf(x / sqrt 2)) / 2.
struct Gelu {
  static constexpr Activation kCode = Activation::kGelu;
  static constexpr char const* kName = "gelu";

  // Phi(-a) = exp(-a^2 / 2) h(a) with h(a) = erfcx(a / sqrt 2) / 2. Unlike 1 + erf(x), this does
  // not cancel for negative x. h is a rational minimax approximation on [0, 13.3] (weighted linear
  // least squares, Lawson's weights, fitted in 50 digits): relative error 5e-9, and all
  // coefficients positive. x * 0 keeps NaN for -inf, as PyTorch has it.
  FUSEDCONV_INLINE static float host(float x) {
    float const magnitude = std::fabs(x);
    float const a = host::select(magnitude > 14.0f, 14.0f, magnitude);
    float const numerator =
        0.500000002445f +
        a * (0.435678692055f +
             a * (0.181300439161f + a * (0.0399818270457f + a * 0.00401976981466f)));
    float const denominator =
        1.0f + a * (1.66924229912f +
                    a * (1.19445942815f +
                         a * (0.464363417702f + a * (0.100226960492f + a * 0.0100759254296f))));
    float const tail = host::exp_of_nonpositive(-0.5f * x * x) * (numerator / denominator);
    return x * host::select(x < 0.0f, tail, 1.0f - tail);
  }
#ifdef __CUDACC__
  __device__ __forceinline__ static float value(float x) {
    return 0.5f * x * (1.0f + erff(x * 0.70710678118654752440f));
  }
  __device__ __forceinline__ static float slope(float x) {
    float const density = 0.39894228040143267794f * expf(-0.5f * x * x);
    return fmaf(x, density, 0.5f * (1.0f + erff(x * 0.70710678118654752440f)));
  }
  // Phi = 1 / (1 + 2^-h): h(x) = log2(Phi / (1 - Phi)) is odd and smooth, and a polynomial of
  // degree nine (least maximum error of x Phi(x), found by weighted least squares) keeps the result
  // within 3.4e-6 of the erf form, apart from the last places of exp2 and reciprocal.
  __device__ __forceinline__ static float quick(float x) {
    float const square = x * x;
    float h = -3.21037604e-06f;
    h = fmaf(h, square, 8.79097413e-05f);
    h = fmaf(h, square, 0.00036204786f);
    h = fmaf(h, square, -0.105229977f);
    h = fmaf(h, square, -2.30204378f);
    return x * device::quick_reciprocal(1.0f + device::quick_exp2(x * h));
  }
#endif
};

// 0.5 x (1 + tanh u) with u = sqrt(2 / pi) (x + 0.044715 x^3).
struct GeluTanh {
  static constexpr Activation kCode = Activation::kGeluTanh;
  static constexpr char const* kName = "gelu_tanh";
  // (1 + tanh u) / 2 is the logistic function of 2 u.
  FUSEDCONV_INLINE static float host(float x) {
    return host::times_logistic(x, 1.5957691216f * (x + 0.044715f * x * x * x));
  }
#ifdef __CUDACC__
  __device__ __forceinline__ static float value(float x) {
    float const inner = 0.79788456080286535588f * fmaf(0.044715f * x * x, x, x);
    return 0.5f * x * (1.0f + tanhf(inner));
  }
  __device__ __forceinline__ static float slope(float x) {
    constexpr float kScale = 0.79788456080286535588f;
    float const t = tanhf(kScale * fmaf(0.044715f * x * x, x, x));
    return 0.5f * (1.0f + t) +
           0.5f * x * (1.0f - t * t) * kScale * fmaf(3.0f * 0.044715f * x, x, 1.0f);
  }
  // 0.5 (1 + tanh(u)) = 1 / (1 + 2^(-2 u log2(e)))
  __device__ __forceinline__ static float quick(float x) {
    float const h = x * fmaf(-0.10294324f, x * x, -2.3022082f);
    return x * device::quick_reciprocal(1.0f + device::quick_exp2(h));
  }
#endif
};

// x / (1 + exp(-x)).
struct Silu {
  static constexpr Activation kCode = Activation::kSilu;
  static constexpr char const* kName = "silu";
  FUSEDCONV_INLINE static float host(float x) { return host::times_logistic(x, x); }
#ifdef __CUDACC__
  __device__ __forceinline__ static float value(float x) { return x / (1.0f + expf(-x)); }
  __device__ __forceinline__ static float slope(float x) {
    float const logistic = 1.0f / (1.0f + expf(-x));
    return logistic * fmaf(x, 1.0f - logistic, 1.0f);
  }
  __device__ __forceinline__ static float quick(float x) {
    return x * device::quick_reciprocal(1.0f + device::quick_exp2(-1.44269504f * x));
  }
#endif
};

// Calls body with the struct of an activation whose code is known at run time, and with values, if
// any: device code of a lambda that captures them comes out differently. A switch, which compilers
// turn into fewer branches than a chain of comparisons.
template <class Body, class... Values>
FUSEDCONV_INLINE constexpr decltype(auto) dispatch_activation(Activation code, Body&& body,
                                                              Values... values) {
  switch (code) {
    case Activation::kIdentity: return body(Identity{}, values...);
    case Activation::kRelu: return body(Relu{}, values...);
    case Activation::kGelu: return body(Gelu{}, values...);
    case Activation::kGeluTanh: return body(GeluTanh{}, values...);
    case Activation::kSilu: return body(Silu{}, values...);
  }
  return body(Identity{}, values...);
}

template <class... Each>
struct List {
  static constexpr std::array<char const*, sizeof...(Each)> names() { return {Each::kName...}; }

  static constexpr bool codes_are_indices() {
    int index = 0;
    return ((static_cast<int>(Each::kCode) == index++) && ...);
  }
  static constexpr bool each_is_dispatched() {
    return ((dispatch_activation(Each::kCode, [](auto a) { return a.kCode; }) == Each::kCode) &&
            ...);
  }
};

using All = List<Identity, Relu, Gelu, GeluTanh, Silu>;
static_assert(All::codes_are_indices(), "names are found by code");
static_assert(All::each_is_dispatched(),
              "a code that dispatch_activation() lacks would be the identity");

}  // namespace activations

using activations::dispatch_activation;

template <>
inline constexpr auto kNames<Activation> = activations::All::names();

#ifdef __CUDACC__
namespace device {

// The branches are uniform over the grid: the activation is one argument of the launch.
__device__ __forceinline__ float activate(Activation activation, float x) {
  return dispatch_activation(activation, [](auto a, float v) { return a.value(v); }, x);
}

// The same behind a call. Kernels that hold many values in registers use it, or each of their
// unrolled loops would hold every activation once per value.
static __device__ __noinline__ float activate_by_call(Activation activation, float x) {
  return activate(activation, x);
}

// The derivative.
__device__ __forceinline__ float slope(Activation activation, float x) {
  return dispatch_activation(activation, [](auto a, float v) { return a.slope(v); }, x);
}

// The value of an activation that is known at compile time, quick where it has such a form.
template <class A>
__device__ __forceinline__ float quick_value(float x) {
  if constexpr (requires { A::quick(x); }) {
    return A::quick(x);
  } else {
    return A::value(x);
  }
}

}  // namespace device
#endif

}  // namespace fusedconv
