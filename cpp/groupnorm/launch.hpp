// What the launches of every pass have in common: checks, and template arguments from run-time
// values.
#pragma once

#include <type_traits>

#include "cuda/tile.hpp"
#include "fusedconv/check.hpp"
#include "fusedconv/groupnorm.hpp"
#include "groupnorm/affine.hpp"

namespace fusedconv::groupnorm {

inline void check(GroupNormProblem const& p) {
  FUSEDCONV_CHECK(p.groups > 0 && p.channels > 0 && p.channels % p.groups == 0, "num_groups: got ",
                  p.groups, " for ", p.channels, " channels");
  FUSEDCONV_CHECK(p.channels <= 0x7fffffff, "channels: got ", p.channels);
  FUSEDCONV_CHECK(p.input_row_channels() >= p.channels, "row_channels: got ", p.row_channels,
                  " for ", p.channels, " channels");
}

// Calls body(T{}, whether there is any activation), the second as a type.
template <class F>
void dispatch_kernel(GroupNormProblem const& p, F&& body) {
  bool const activate =
      p.activation_before != Activation::kIdentity || p.activation_after != Activation::kIdentity;
  device::dispatch_type(p.dtype, [&](auto zero) {
    device::dispatch_bool(activate, [&](auto active) { body(zero, active); });
  });
}

// Calls body with what it is to know of activations; kKnown are the kinds that the kernel has
// beside the first two.
template <bool kActivate, int... kKnown, class F>
void dispatch_known(GroupNormProblem const& p, F&& body) {
  if constexpr (kActivate) {
    auto const known = known_activations(p);
    auto const serve = [&](auto kind) {
      if (known != kind.value) return false;
      body(kind);
      return true;
    };
    if ((serve(std::integral_constant<int, kKnown>{}) || ...)) return;
  }
  body(std::integral_constant<int, kActivate>{});
}

// Elements of an access to rows of channels: 16 bytes of them, or one.
inline int last_vector(GroupNormProblem const& p, void const* input, void const* output) {
  int const vector = int(16 / size_of(p.dtype));
  bool const aligned =
      p.input_row_channels() % vector == 0 && device::is_aligned(input, 16) &&
      (output == nullptr || (p.channels % vector == 0 && device::is_aligned(output, 16)));
  return aligned ? vector : 1;
}

template <class T, class F>
void dispatch_last_vector(int vector, F&& body) {
  if (vector == 1) return body(std::integral_constant<int, 1>{});
  body(std::integral_constant<int, 16 / int(sizeof(T))>{});
}

}  // namespace fusedconv::groupnorm
