// Everything that an activation is: its code and name, its value on the processor and on the GPU,
// its slope. A new one is a code, a struct, a case and an entry of the list, all of them
// here.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <tuple>

#include "fusedconv/types.hpp"

// Loops that are compiled for several instruction sets must inline all that they call, or they
// would share the code of one of them.
#define FUSEDCONV_INLINE inline __attribute__((always_inline))

namespace fusedconv {

enum class Activation : int { kIdentity, kRelu, kGelu, kGeluTanh, kSilu };

// Of vectors of float32, as GCC and Clang have them: comparisons give a mask of integers, and
// numbers stand for vectors of equal elements.
namespace host {

template <class V>
using Mask = decltype(V{} < V{});

template <class V>
FUSEDCONV_INLINE V select(Mask<V> condition, V a, V b) {
  return condition ? a : b;
}

template <class V>
FUSEDCONV_INLINE V magnitude(V x) {
  return std::bit_cast<V>(std::bit_cast<Mask<V>>(x) & 0x7fffffff);
}

// Relative error 2e-7; 0 below -126, where the result would leave the normal range. x <= 127.
template <class V>
FUSEDCONV_INLINE V exp2(V x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  V const shifted = x + kRound;
  V const r = x - (shifted - kRound);
  // (2^r - 1) / r on |r| <= 1/2, least maximum error: 2e-9 of 2^r, and 2^0 is exact.
  V const p = 0.6931471825f +
              r * (0.2402264774f +
                   r * (0.05550332367f +
                        r * (0.009618436918f + r * (0.001339887385f + r * 0.0001535336196f))));
  Mask<V> const scale = (std::bit_cast<Mask<V>>(shifted) << 23) + 0x3f800000;
  return select<V>(x < -126.0f, V{}, (1.0f + r * p) * std::bit_cast<V>(scale));
}

template <class V>
struct Logistic {
  V value;       // 1 / (1 + exp(-x))
  V complement;  // 1 - value, without cancellation
};

template <class V>
FUSEDCONV_INLINE Logistic<V> logistic(V x) {
  V const e = exp2(-1.44269504f * magnitude(x));
  V const d = 1.0f + e;
  // 1 / d on [1, 2] within 1 %, then two of Newton's steps: dividing takes longer.
  V r = 2.121211856f + d * (-1.454545087f + d * 0.323232226f);
  r = r + r * (1.0f - d * r);
  r = r + r * (1.0f - d * r);
  V const small = e * r;
  return {select<V>(x < 0.0f, small, r), select<V>(x < 0.0f, r, small)};
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

// These keep NaN, as fminf() and fmaxf() do not.
__device__ __forceinline__ float minimum(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
__device__ __forceinline__ float maximum(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

}  // namespace device
#endif

// One struct an activation. host(x), host_slope(x): value and derivative of a vector, for loops of
// the processor; host_gradient(x, grad), where it is more than a product. value(x), slope(x): on
// the GPU, and both in both(x, value, slope) where they share something. quick(x), quick_slope(x),
// and both in quick_both(x, value, slope), where there are: off by less than the rounding of
// operands to TF32 or 16 bits.
namespace activations {

struct Identity {
  static constexpr Activation kCode = Activation::kIdentity;
  static constexpr char const* kName = "identity";
  template <class V>
  FUSEDCONV_INLINE static V host(V x) {
    return x;
  }
  template <class V>
  FUSEDCONV_INLINE static V host_slope(V) {
    return V{} + 1.0f;
  }
#ifdef __CUDACC__
  __device__ __forceinline__ static float value(float x) { return x; }
  __device__ __forceinline__ static float slope(float) { return 1.0f; }
#endif
};

// Comparing instead of taking a maximum keeps NaN, as torch does.
struct Relu {
  static constexpr Activation kCode = Activation::kRelu;
  static constexpr char const* kName = "relu";
  template <class V>
  FUSEDCONV_INLINE static V host(V x) {
    return host::select<V>(x < 0.0f, V{}, x);
  }
  template <class V>
  FUSEDCONV_INLINE static V host_slope(V x) {
    return host_gradient(x, V{} + 1.0f);
  }
  // What is stopped is zero whatever comes, infinity and NaN among it.
  template <class V>
  FUSEDCONV_INLINE static V host_gradient(V x, V grad) {
    return host::select<V>(x <= 0.0f, V{}, grad);
  }
#ifdef __CUDACC__
  // One instruction, and NaN where that comes.
  __device__ __forceinline__ static float value(float x) {
    float result;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(result) : "f"(x));
    return result;
  }
  __device__ __forceinline__ static float slope(float x) { return x <= 0.0f ? 0.0f : 1.0f; }
#endif
};

// x Phi(x) with Phi(x) = (1 + erf(x / sqrt 2)) / 2.
struct Gelu {
  static constexpr Activation kCode = Activation::kGelu;
  static constexpr char const* kName = "gelu";

  // P(a) with Phi(-a) = 2^P(a): unlike 1 + erf(x), this does not cancel for negative x. P and the
  // polynomial below have the least maximum error relative to x on [0, 6] (weighted least squares,
  // Lawson's weights): 2e-8. Beyond, where Phi(-a) < 1e-9, P falls faster than it should.
  template <class V>
  FUSEDCONV_INLINE static constexpr V log2_tail(V a) {
    return -1.0f +
           a * (-1.151106238f +
                a * (-0.4591955841f +
                     a * (-0.05254659429f +
                          a * (0.007154651918f +
                               a * (-0.0002214867127f +
                                    a * (-0.0001448171534f +
                                         a * (2.927778769e-05f - a * 1.870691335e-06f)))))));
  }
  template <class V>
  FUSEDCONV_INLINE static V tail(V a) {
    return host::exp2(log2_tail(a));
  }
  template <class V>
  FUSEDCONV_INLINE static V bounded_magnitude(V x) {
    V const magnitude = host::magnitude(x);
    return host::select<V>(magnitude > 14.0f, V{} + 14.0f, magnitude);
  }
  // x * 0 keeps NaN for -inf, as PyTorch has it.
  template <class V>
  FUSEDCONV_INLINE static V host(V x) {
    V const t = tail(bounded_magnitude(x));
    return x * host::select<V>(x < 0.0f, t, 1.0f - t);
  }
  // Phi(x) + x phi(x); at -a this is Phi(-a) (1 - m(a)), where m(a) = a phi(a) / Phi(-a) is smooth.
  template <class V>
  FUSEDCONV_INLINE static V host_slope(V x) {
    V const a = bounded_magnitude(x);
    V const m =
        a * (0.7978868484f +
             a * (0.636584878f +
                  a * (0.1091830954f +
                       a * (-0.019543631f +
                            a * (0.0003316379443f +
                                 a * (0.0009290726739f +
                                      a * (-0.0002697946329f +
                                           a * (3.486370042e-05f - a * 1.785003406e-06f))))))));
    V const t = tail(a) * (1.0f - m);
    return host::select<V>(x < 0.0f, t, 1.0f - t);
  }
#ifdef __CUDACC__
  // x Phi(x) = max(x, 0) - a Phi(-a) with a = |x|. The bound keeps infinity from meeting a zero
  // factor; -inf does and gives NaN, as PyTorch has it.
  __device__ __forceinline__ static float value(float x) {
    float const a = fabsf(device::minimum(x, 1e30f));
    return fmaf(-a, device::quick_exp2(log2_tail(a)), device::maximum(x, 0.0f));
  }
  __device__ __forceinline__ static float slope(float x) {
    float const density = 0.39894228040143267794f * expf(-0.5f * x * x);
    return fmaf(x, density, 0.5f * (1.0f + erff(x * 0.70710678118654752440f)));
  }
  // x Phi(x), and Phi(x) + x phi(x) by the same Phi. At infinity the slope is NaN, as PyTorch has
  // it.
  __device__ __forceinline__ static void both(float x, float& value, float& slope) {
    both_by(log2_tail(fabsf(x)), x, value, slope);
  }
  __device__ __forceinline__ static void both_by(float log2_tail, float x, float& value,
                                                 float& slope) {
    float const tail = device::quick_exp2(log2_tail);
    float const below = x < 0.0f ? tail : 1.0f - tail;
    value = x * below;
    // log2 phi(x) = -log2(e) / 2 x^2 - log2(2 pi) / 2
    float const density = device::quick_exp2(fmaf(-0.72134752f * x, x, -1.32574806f));
    slope = fmaf(x, density, below);
  }
  // As value(), but with a polynomial of degree five (least maximum error of the result), which
  // keeps it within 2.4e-6 of the erf form, apart from the last places of exp2.
  __device__ __forceinline__ static float quick(float x) {
    float const a = fabsf(device::minimum(x, 1e30f));
    return fmaf(-a, device::quick_exp2(quick_log2_tail(a)), device::maximum(x, 0.0f));
  }
  __device__ __forceinline__ static float quick_log2_tail(float a) {
    float h = -0.00042380642f;
    h = fmaf(h, a, 0.00673046408f);
    h = fmaf(h, a, -0.0509622426f);
    h = fmaf(h, a, -0.460831987f);
    h = fmaf(h, a, -1.15051443f);
    return fmaf(h, a, -1.00004847f);
  }
  // The slope at -a is (c - a) 2^P(a), where it is zero at -c: P, a polynomial of degree five with
  // the least maximum error (Lawson's weights), keeps the result within 5.3e-6 of the erf form. At
  // infinity, where the erf form and PyTorch have NaN, it is 0 or 1.
  __device__ __forceinline__ static float quick_slope(float x) {
    float const a = device::minimum(fabsf(x), 14.0f);
    float h = -7.988508e-04f;
    h = fmaf(h, a, 9.253653e-03f);
    h = fmaf(h, a, -4.7994725e-02f);
    h = fmaf(h, a, -5.6434983e-01f);
    h = fmaf(h, a, -3.8256466e-01f);
    h = fmaf(h, a, -5.8841944e-01f);
    float const tail = (0.75179154f - a) * device::quick_exp2(h);
    return x < 0.0f ? tail : 1.0f - tail;
  }
  // As both(), the slope within 1.7e-5.
  __device__ __forceinline__ static void quick_both(float x, float& value, float& slope) {
    both_by(quick_log2_tail(fabsf(x)), x, value, slope);
  }
#endif
};

// 0.5 x (1 + tanh u) with u = sqrt(2 / pi) (x + 0.044715 x^3).
struct GeluTanh {
  static constexpr Activation kCode = Activation::kGeluTanh;
  static constexpr char const* kName = "gelu_tanh";
  // (1 + tanh u) / 2 is the logistic function of 2 u.
  template <class V>
  FUSEDCONV_INLINE static V host(V x) {
    return x * host::logistic(twice_inner(x)).value;
  }
  template <class V>
  FUSEDCONV_INLINE static V host_slope(V x) {
    auto const [value, complement] = host::logistic(twice_inner(x));
    return value + x * value * complement * (1.5957691216f * (1.0f + 3.0f * 0.044715f * x * x));
  }
  template <class V>
  FUSEDCONV_INLINE static V twice_inner(V x) {
    return 1.5957691216f * (x + 0.044715f * x * x * x);
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
  // Beyond the bounds the slope is 0 or 1, and the product of zero and x cubed might be NaN.
  __device__ __forceinline__ static float quick_slope(float x) {
    x = device::minimum(device::maximum(x, -16.0f), 16.0f);
    float const square = x * x;
    float const h = x * fmaf(-0.10294324f, square, -2.3022082f);
    float const logistic = device::quick_reciprocal(1.0f + device::quick_exp2(h));
    float const inner = x * fmaf(0.21406442f, square, 1.5957691f);
    return logistic * fmaf(inner, 1.0f - logistic, 1.0f);
  }
#endif
};

// x / (1 + exp(-x)).
struct Silu {
  static constexpr Activation kCode = Activation::kSilu;
  static constexpr char const* kName = "silu";
  template <class V>
  FUSEDCONV_INLINE static V host(V x) {
    return x * host::logistic(x).value;
  }
  template <class V>
  FUSEDCONV_INLINE static V host_slope(V x) {
    auto const [value, complement] = host::logistic(x);
    return value * (1.0f + x * complement);
  }
#ifdef __CUDACC__
  __device__ __forceinline__ static float value(float x) { return x / (1.0f + expf(-x)); }
  __device__ __forceinline__ static float slope(float x) {
    float const logistic = 1.0f / (1.0f + expf(-x));
    return logistic * fmaf(x, 1.0f - logistic, 1.0f);
  }
  __device__ __forceinline__ static float quick(float x) {
    return x * device::quick_reciprocal(1.0f + device::quick_exp2(-1.44269504f * x));
  }
  __device__ __forceinline__ static float quick_slope(float x) {
    float const logistic = device::quick_reciprocal(1.0f + device::quick_exp2(-1.44269504f * x));
    return logistic * fmaf(x, 1.0f - logistic, 1.0f);
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
  template <int index>
  using At = std::tuple_element_t<index, std::tuple<Each...>>;

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

// The value of an activation that is known at compile time, quick where it has such a form.
template <class A>
__device__ __forceinline__ float quick_value(float x) {
  if constexpr (requires { A::quick(x); }) {
    return A::quick(x);
  } else {
    return A::value(x);
  }
}

// The derivative, likewise.
template <class A>
__device__ __forceinline__ float quick_slope(float x) {
  if constexpr (requires { A::quick_slope(x); }) {
    return A::quick_slope(x);
  } else {
    return A::slope(x);
  }
}

// And both.
template <class A>
__device__ __forceinline__ void quick_both(float x, float& value, float& slope) {
  if constexpr (requires { A::quick_both(x, value, slope); }) {
    A::quick_both(x, value, slope);
  } else {
    value = quick_value<A>(x);
    slope = quick_slope<A>(x);
  }
}

}  // namespace device
#endif

}  // namespace fusedconv
