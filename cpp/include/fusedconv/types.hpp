// Scalar vocabulary shared by every kernel and by the binding. No torch, no Python, no CUDA here.
#pragma once

#include <cstdint>

namespace fusedconv {

// The values are the codes that Python passes; python/fusedconv/problem.py holds the same table.
enum class DType : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

enum class Activation : int {
  kIdentity = 0,
  kRelu = 1,
  kGelu = 2,      // 0.5 x (1 + erf(x / sqrt 2))
  kGeluTanh = 3,  // 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
  kSilu = 4,      // x / (1 + exp(-x))
};

// Where the channel axis lies: N, C, pixels or N, pixels, C. Pixels are all spatial axes, flattened.
enum class Layout : int { kChannelsFirst = 0, kChannelsLast = 1 };

constexpr int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

constexpr char const* name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return "float32";
    case DType::kFloat16: return "float16";
    case DType::kBFloat16: return "bfloat16";
  }
  return "unknown dtype";
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace fusedconv
