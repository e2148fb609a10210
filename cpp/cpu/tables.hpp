// Tables of loops, filled with the instances of templates.
#pragma once

#include <type_traits>
#include <utility>

#include "cpu/loops.hpp"
#include "cpu/vector.hpp"

namespace fusedconv::cpu::FUSEDCONV_INSTRUCTION_SET {

template <class T>
struct Type {
  using type = T;
};

template <int index>
constexpr auto element() {
  static_assert(kDTypes == 3);
  if constexpr (index == static_cast<int>(DType::kFloat32)) {
    return Type<float>{};
  } else if constexpr (index == static_cast<int>(DType::kFloat16)) {
    return Type<Float16>{};
  } else {
    return Type<BFloat16>{};
  }
}
template <int index>
using Element = typename decltype(element<index>())::type;

template <int code>
using ActivationOf = activations::All::At<code>;

// The activations in front of the affine map and behind it.
template <int place>
using Before = ActivationOf<(place < kActivations ? place : 0)>;
template <int place>
using After = ActivationOf<(place < kActivations ? 0 : place - kActivations + 1)>;

// Whether loops read the first and write the second.
template <class From, class To>
inline constexpr bool kConverts =
    std::is_same_v<From, To> || std::is_same_v<From, float> || std::is_same_v<To, float>;

// Calls body(std::integral_constant<int, 0>{}) to count - 1.
template <int count, class Body>
constexpr void for_each_index(Body body) {
  [&]<int... index>(std::integer_sequence<int, index...>) {
    (body(std::integral_constant<int, index>{}), ...);
  }(std::make_integer_sequence<int, count>{});
}

}  // namespace fusedconv::cpu::FUSEDCONV_INSTRUCTION_SET
