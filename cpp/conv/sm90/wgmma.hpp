// Instructions of the warpgroup tensor cores with accumulators in arrays.
#pragma once

#include <cstdint>
#include <utility>

#include "cute/arch/mma_sm90_gmma.hpp"

namespace fusedconv::conv::sm90 {

// sum += a b, or = where scale says so; a from registers, b by its descriptor.
template <class Mma, int... kIndex>
__device__ __forceinline__ void multiply(uint32_t const (&a)[4], uint64_t b,
                                         float (&sum)[sizeof...(kIndex)],
                                         cute::SM90::GMMA::ScaleOut scale,
                                         std::integer_sequence<int, kIndex...>) {
  Mma::fma(a[0], a[1], a[2], a[3], b, sum[kIndex]..., scale);
}

// Of the accumulators from kFirst on, as many as kIndex are.
template <class Mma, int kFirst, int kCount, int... kIndex>
__device__ __forceinline__ void multiply_part(uint32_t const (&a)[4], uint64_t b,
                                              float (&sum)[kCount],
                                              std::integer_sequence<int, kIndex...>) {
  Mma::fma(a[0], a[1], a[2], a[3], b, sum[kFirst + kIndex]..., cute::SM90::GMMA::ScaleOut::One);
}

}  // namespace fusedconv::conv::sm90
