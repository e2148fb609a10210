// How CUTLASS rounds floats to TF32, as this library wants it. Comes before CUTLASS's own kernels,
// which would else instantiate the templates that are specialised here.
#pragma once

#include <cstdint>

#include "cuda/math.hpp"
#include "cutlass/numeric_conversion.h"

// How CUTLASS's 3xTF32 operator splits a float. Its own choice truncates the big part, which leaves
// a small part of one sign and up to twice the size; the product small*small that 3xTF32 drops then
// biases every sum. Rounding the big part to nearest makes it zero-mean and a quarter of the size;
// of the small part the tensor core drops a bit at most. The operator offers no parameter for this,
// so its converter is specialised.
template <>
struct cutlass::NumericConverterFastF32<cutlass::FloatRoundStyle::round_toward_zero,
                                        cutlass::FloatRoundStyle::round_half_ulp_truncate> {
  using result_type = cutlass::Array<cutlass::tfloat32_t, 2>;
  using source_type = float;

  CUTLASS_DEVICE static result_type convert(float const& source) {
    float const big = fusedconv::device::big_tf32(source);
    result_type result;
    result[0] = cutlass::tfloat32_t::bitcast(__float_as_uint(big));
    result[1] = cutlass::tfloat32_t::bitcast(__float_as_uint(source - big));
    return result;
  }
  CUTLASS_DEVICE result_type operator()(float const& source) const { return convert(source); }
};

// How CUTLASS's main loop rounds floats to TF32. Before compute capability 9.0 it prefers to round
// ties away from zero.
template <int kCount>
struct cutlass::NumericArrayConverter<cutlass::tfloat32_t, float, kCount,
                                      cutlass::FloatRoundStyle::round_half_ulp_truncate,
                                      cutlass::transform::thread::UnaryTransform::Identity> {
  using result_type = cutlass::Array<cutlass::tfloat32_t, kCount>;
  using source_type = cutlass::Array<float, kCount>;

  CUTLASS_DEVICE static result_type convert(source_type const& source) {
    result_type result;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) {
      uint32_t rounded = __float_as_uint(fusedconv::device::round_to_tf32(source[i]));
      // In order: rounding all of a fragment ahead of its products would take more registers.
      asm volatile("" : "+r"(rounded));
      result[i] = cutlass::tfloat32_t::bitcast(rounded);
    }
    return result;
  }
  CUTLASS_DEVICE result_type operator()(source_type const& source) const { return convert(source); }
};
