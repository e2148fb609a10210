// The convolution's epilogue: bias and activation.
#pragma once

#include "cutlass/array.h"
#include "cutlass/numeric_conversion.h"
#include "fusedconv/activation.hpp"

namespace fusedconv::conv::sm80 {

// Epilogue functor in CUTLASS's form: activation(accumulator + bias), computed in fp32 on the
// accumulator before any rounding to the output's type. The bias arrives as the source tensor with
// strides of zero.
template <class ElementOutput_, int kElements>
class BiasActivation {
 public:
  using ElementOutput = ElementOutput_;
  using ElementAccumulator = float;
  using ElementCompute = float;
  static int const kCount = kElements;
  static bool const kIsHeavy = true;  // an exact erf: keep the epilogue's loops rolled
  using FragmentOutput = cutlass::Array<ElementOutput, kCount>;
  using FragmentSource = FragmentOutput;
  using FragmentAccumulator = cutlass::Array<float, kCount>;

  struct Params {
    Activation activation = Activation::kIdentity;
    bool has_bias = false;
  };

  CUTLASS_HOST_DEVICE explicit BiasActivation(Params const& params) : params_(params) {}

  CUTLASS_HOST_DEVICE bool is_source_needed() const { return params_.has_bias; }

  // The sum over channels may be cut into parts: the first adds the bias, each later one the sum so
  // far, which stands in the output, and the last applies the activation.
  CUTLASS_HOST_DEVICE void set_k_partition(int part, int parts) {
    if (part > 0) params_.has_bias = true;
    if (part < parts - 1) params_.activation = Activation::kIdentity;
  }

  CUTLASS_DEVICE FragmentOutput operator()(FragmentAccumulator const& accumulator,
                                           FragmentSource const& source) const {
    cutlass::NumericArrayConverter<float, ElementOutput, kCount> to_compute;
    FragmentAccumulator sum = to_compute(source);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) sum[i] += accumulator[i];
    return (*this)(sum);
  }

  CUTLASS_DEVICE FragmentOutput operator()(FragmentAccumulator const& accumulator) const {
    FragmentAccumulator result;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) {
      result[i] = device::activate(params_.activation, accumulator[i]);
    }
    cutlass::NumericArrayConverter<ElementOutput, float, kCount> to_output;
    return to_output(result);
  }

 private:
  Params params_;
};

}  // namespace fusedconv::conv::sm80
