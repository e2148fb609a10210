#include "cpu/loops.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

// Inner loops are compiled for several instruction sets, chosen at load time. They must be plain
// functions, and all that they call must inline, or the clones would share baseline code.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    __GNUC__ >= 12
#define FUSEDCONV_CLONES \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FUSEDCONV_CLONES
#endif
#ifdef __clang__
#define FUSEDCONV_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define FUSEDCONV_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace fusedconv::cpu {
namespace {

// ---- Conversions of one element ----

FUSEDCONV_INLINE float from_float16(uint16_t bits) {
  uint32_t const magnitude = static_cast<uint32_t>(bits & 0x7fffu) << 13;
  uint32_t const exponent = magnitude & 0x0f800000u;
  uint32_t const normal =
      magnitude + (112u << 23) + host::select(exponent == 0x0f800000u, 112u << 23, 0u);
  // A denormal gets an implicit one, which the subtraction of 2^-14 takes off again.
  float const denormal = std::bit_cast<float>(magnitude + (113u << 23)) - 0x1p-14f;
  uint32_t const value = host::select(exponent == 0u, std::bit_cast<uint32_t>(denormal), normal);
  return std::bit_cast<float>(value | static_cast<uint32_t>(bits & 0x8000u) << 16);
}

FUSEDCONV_INLINE uint16_t to_float16(float x) {
  uint32_t const bits = std::bit_cast<uint32_t>(x);
  uint32_t const magnitude = bits & 0x7fffffffu;
  uint32_t const normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  // 0.5 has the unit in the last place of a float16 denormal: the addition rounds to it.
  uint32_t const denormal =
      std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t const special = host::select(magnitude > 0x7f800000u, 0x7e00u, 0x7c00u);
  uint32_t const finite = host::select(magnitude < (113u << 23), denormal, normal);
  uint32_t const value = host::select(magnitude >= (143u << 23), special, finite);
  return static_cast<uint16_t>(value | (bits >> 16 & 0x8000u));
}

FUSEDCONV_INLINE float from_bfloat16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

FUSEDCONV_INLINE uint16_t to_bfloat16(float x) {
  uint32_t const bits = std::bit_cast<uint32_t>(x);
  uint32_t const rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  uint32_t const nan = (bits >> 16 & 0x8000u) | 0x7fc0u;
  return static_cast<uint16_t>(host::select((bits & 0x7fffffffu) > 0x7f800000u, nan, rounded));
}

#define FUSEDCONV_MAP(name, function, From, To)                     \
  FUSEDCONV_CLONES void name(From const* x, To* y, int64_t count) { \
    FUSEDCONV_INDEPENDENT                                           \
    for (int64_t i = 0; i < count; ++i) y[i] = function(x[i]);      \
  }
FUSEDCONV_MAP(widen_float16, from_float16, uint16_t, float)
FUSEDCONV_MAP(widen_bfloat16, from_bfloat16, uint16_t, float)
FUSEDCONV_MAP(narrow_float16, to_float16, float, uint16_t)
FUSEDCONV_MAP(narrow_bfloat16, to_bfloat16, float, uint16_t)
#undef FUSEDCONV_MAP

FUSEDCONV_INLINE double total(double const (&part)[8]) {
  return ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
}

}  // namespace

void widen(DType dtype, void const* base, int64_t offset, float* to, int64_t count) {
  switch (dtype) {
    case DType::kFloat32:
      std::memcpy(to, static_cast<float const*>(base) + offset, count * sizeof(float));
      return;
    case DType::kFloat16:
      return widen_float16(static_cast<uint16_t const*>(base) + offset, to, count);
    case DType::kBFloat16:
      return widen_bfloat16(static_cast<uint16_t const*>(base) + offset, to, count);
  }
}

void narrow(DType dtype, float const* from, void* base, int64_t offset, int64_t count) {
  switch (dtype) {
    case DType::kFloat32:
      std::memcpy(static_cast<float*>(base) + offset, from, count * sizeof(float));
      return;
    case DType::kFloat16: return narrow_float16(from, static_cast<uint16_t*>(base) + offset, count);
    case DType::kBFloat16:
      return narrow_bfloat16(from, static_cast<uint16_t*>(base) + offset, count);
  }
}

FUSEDCONV_CLONES void add_block(float const* __restrict x, int64_t rows, int64_t lanes,
                                double rows_before, float* __restrict center,
                                float* __restrict deviation, float* __restrict square,
                                double* __restrict mean, double* __restrict m2) {
  int64_t const count = rows * lanes;
  for (int64_t i = 0; i < lanes; ++i) center[i] = 0.0f;
  for (int64_t row = 0; row < count; row += lanes) {
    for (int64_t i = 0; i < lanes; ++i) center[i] += x[row + i];
  }
  float const reciprocal = 1.0f / static_cast<float>(rows);
  for (int64_t i = 0; i < lanes; ++i) {
    center[i] *= reciprocal;
    deviation[i] = 0.0f;
    square[i] = 0.0f;
  }
  for (int64_t row = 0; row < count; row += lanes) {
    for (int64_t i = 0; i < lanes; ++i) {
      float const d = x[row + i] - center[i];
      deviation[i] += d;
      square[i] += d * d;
    }
  }
  double const per_row = 1.0 / static_cast<double>(rows);
  double const share = static_cast<double>(rows) / (rows_before + static_cast<double>(rows));
  double const weight = rows_before * share;
  for (int64_t i = 0; i < lanes; ++i) {
    double const correction = deviation[i] * per_row;
    double const delta = (center[i] + correction) - mean[i];
    mean[i] += delta * share;
    m2[i] += (square[i] - deviation[i] * correction) + delta * delta * weight;
  }
}

FUSEDCONV_CLONES Moments merge_lanes(int64_t begin, int64_t end, int64_t stride, int64_t run,
                                     int64_t elements, double const* rows, double const* mean,
                                     double const* m2) {
  double sum[8] = {}, square[8] = {};
  for (int64_t first = begin; first < end; first += stride) {
    int64_t lane = first;
    for (; lane + 8 <= first + run; lane += 8) {
      for (int k = 0; k < 8; ++k) sum[k] += rows[lane + k] * mean[lane + k];
    }
    for (; lane < first + run; ++lane) sum[0] += rows[lane] * mean[lane];
  }
  double const center = total(sum) / static_cast<double>(elements);
  auto const about_center = [=](int64_t lane) __attribute__((always_inline)) {
    return m2[lane] + rows[lane] * (mean[lane] - center) * (mean[lane] - center);
  };
  for (int64_t first = begin; first < end; first += stride) {
    int64_t lane = first;
    for (; lane + 8 <= first + run; lane += 8) {
      for (int k = 0; k < 8; ++k) square[k] += about_center(lane + k);
    }
    for (; lane < first + run; ++lane) square[0] += about_center(lane);
  }
  return {center, total(square)};
}

FUSEDCONV_CLONES void apply_to_lanes(float const* x, float* y, int64_t count, int64_t lanes,
                                     float const* mean, float const* scale, float const* shift) {
  for (int64_t row = 0; row < count; row += lanes) {
    int64_t const end = std::min(lanes, count - row);
    FUSEDCONV_INDEPENDENT
    for (int64_t i = 0; i < end; ++i) y[row + i] = (x[row + i] - mean[i]) * scale[i] + shift[i];
  }
}

FUSEDCONV_CLONES void apply_to_pixels(float const* x, float* y, int64_t count, int64_t pixels,
                                      int64_t skip, float const* mean, float const* scale,
                                      float const* shift) {
  for (int64_t row = -skip; row < count; row += pixels, ++mean, ++scale, ++shift) {
    float const m = *mean, a = *scale, b = *shift;
    int64_t const end = std::min(row + pixels, count);
    FUSEDCONV_INDEPENDENT
    for (int64_t i = std::max<int64_t>(row, 0); i < end; ++i) y[i] = (x[i] - m) * a + b;
  }
}

FUSEDCONV_CLONES void activate(Activation activation, float const* x, float* y, int64_t count) {
  if (activation == Activation::kIdentity) return;
  dispatch_activation(activation, [=](auto a) __attribute__((always_inline)) {
    FUSEDCONV_INDEPENDENT
    for (int64_t i = 0; i < count; ++i) y[i] = a.host(x[i]);
  });
}

}  // namespace fusedconv::cpu
