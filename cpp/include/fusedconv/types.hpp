// Scalar vocabulary shared by every kernel and by the binding. No torch, no Python, no CUDA here.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace fusedconv {

// The names of an enum's values, which count from 0. Python's enums take theirs from here.
template <class E>
inline constexpr std::array<char const*, 0> kNames{};

enum class DType : int { kFloat32, kFloat16, kBFloat16 };
template <>
inline constexpr std::array kNames<DType>{"float32", "float16", "bfloat16"};

// Where the channel axis lies: N, C, pixels or N, pixels, C. Pixels are all spatial axes together.
enum class Layout : int { kChannelsFirst, kChannelsLast };
template <>
inline constexpr std::array kNames<Layout>{"nchw", "nhwc"};

template <class E>
constexpr char const* name_of(E value) {
  static_assert(kNames<E>.size() > 0, "the enum has a table of names");
  auto const index = static_cast<std::size_t>(value);
  return index < kNames<E>.size() ? kNames<E>[index] : "unknown";
}

constexpr int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace fusedconv
