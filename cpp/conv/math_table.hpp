// How kernels form products, with everything that follows from it in one table.
#pragma once

#include <array>
#include <cstddef>

#include "fusedconv/types.hpp"

namespace fusedconv::conv {

enum class Math : int {
  kTf32,         // operands rounded to TF32 by the kernel
  kTf32Rounded,  // operands were rounded to TF32 before
  kTf32x3,       // strict fp32: big*big + big*small + small*big
  kF16,
  kBF16,
  kF32,  // fused multiply-adds in float32
};

struct MathTraits {
  char const* name;
  char const* precision;  // what a caller asks for: tf32, fp32, fp16 or bf16
  DType dtype;            // of input, weight, bias and output
  int parts;              // terms that an operand is split into

  constexpr int element_bytes() const { return static_cast<int>(size_of(dtype)); }
};

inline constexpr std::array<MathTraits, 6> kMathTraits{{
    {"tf32", "tf32", DType::kFloat32, 1},
    {"tf32_rounded", "tf32", DType::kFloat32, 1},
    {"tf32x3", "fp32", DType::kFloat32, 2},
    {"f16", "fp16", DType::kFloat16, 1},
    {"bf16", "bf16", DType::kBFloat16, 1},
    {"f32", "fp32", DType::kFloat32, 1},
}};

constexpr MathTraits const& traits_of(Math math) {
  return kMathTraits[static_cast<std::size_t>(math)];
}

}  // namespace fusedconv::conv

namespace fusedconv {

template <>
inline constexpr auto kNames<conv::Math> = [] {
  std::array<char const*, conv::kMathTraits.size()> names{};
  for (std::size_t i = 0; i < names.size(); ++i) names[i] = conv::kMathTraits[i].name;
  return names;
}();

}  // namespace fusedconv
