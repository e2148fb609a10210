// What kernels that read or write whole vectors of a weight ask of how it lies. Host code.
#pragma once

#include <cstdint>

#include "conv/problem.hpp"

namespace fusedconv::conv {

// Whether taps follow each other in a weight, each so many elements behind the one before.
inline bool taps_follow(FilterSource const& f, int64_t stride) {
  return (f.s == 1 || f.stride_s == stride) && (f.r == 1 || f.stride_r == stride * f.s) &&
         (f.t == 1 || f.stride_t == stride * f.s * f.r);
}

// Whether the lines of a weight whose `c` are beside each other begin at multiples of so many
// elements, if the first does.
inline bool lines_begin_at(FilterSource const& f, int64_t elements) {
  auto const whole = [&](int64_t extent, int64_t stride) {
    return extent == 1 || stride % elements == 0;
  };
  return whole(f.k, f.stride_k) && whole(f.t, f.stride_t) && whole(f.r, f.stride_r) &&
         whole(f.s, f.stride_s);
}

}  // namespace fusedconv::conv
