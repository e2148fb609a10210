// Stores to tensors whose type is known when a kernel runs.
#pragma once

#include <cstdint>

#include "cuda/math.hpp"
#include "fusedconv/types.hpp"

namespace fusedconv::device {

// A float, rounded to one of the three types; for small vectors such as gradients of weight and
// bias.
__device__ __forceinline__ void store_from_float(void* base, int64_t index, DType dtype,
                                                 float value) {
  switch (dtype) {
    case DType::kFloat32: static_cast<float*>(base)[index] = value; return;
    case DType::kFloat16: static_cast<__half*>(base)[index] = from_float<__half>(value); return;
    case DType::kBFloat16:
      static_cast<__nv_bfloat16*>(base)[index] = from_float<__nv_bfloat16>(value);
      return;
  }
}

}  // namespace fusedconv::device
