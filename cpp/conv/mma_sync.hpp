// Warp-wide products by mma.sync: the instruction of each way of forming products, and how its
// operands come from shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "conv/math_table.hpp"
#include "cuda/math.hpp"
#include "cute/arch/copy_sm75.hpp"
#include "cute/arch/mma_sm80.hpp"

namespace fusedconv::conv {

// Fragments of a 16-byte chunk of channels have the same registers for elements of 2 and 4 bytes:
// what differs is the instruction.
template <Math kMath>
struct Instruction;
template <>
struct Instruction<Math::kTf32> {
  using Element = float;
  using Mma = cute::SM80_16x8x8_F32TF32TF32F32_TN;
};
template <>
struct Instruction<Math::kTf32x3> : Instruction<Math::kTf32> {};
template <>
struct Instruction<Math::kF16> {
  using Element = __half;
  using Mma = cute::SM80_16x8x16_F32F16F16F32_TN;
};
template <>
struct Instruction<Math::kBF16> {
  using Element = __nv_bfloat16;
  using Mma = cute::SM80_16x8x16_F32BF16BF16F32_TN;
};

// Each lane names a row of 16 bytes: lanes 0 to 7 those of the first of four matrices, and so on.
__device__ __forceinline__ void load_matrices(uint32_t (&words)[4], unsigned char const* row) {
  cute::SM75_U32x4_LDSM_N::copy(*reinterpret_cast<cute::uint128_t const*>(row), words[0], words[1],
                                words[2], words[3]);
}

// Two matrices, of which lanes 0 to 15 name the rows.
__device__ __forceinline__ void load_matrices(uint32_t (&words)[2], unsigned char const* row) {
  cute::SM75_U32x2_LDSM_N::copy(*reinterpret_cast<cute::uint128_t const*>(row), words[0], words[1]);
}

// Of floats: the parts of which products in TF32 are made. See device::big_tf32().
template <int kCount>
__device__ __forceinline__ void split(uint32_t (&big)[kCount], uint32_t (&small)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    float const value = __uint_as_float(big[i]);
    float const rounded = device::big_tf32(value);
    big[i] = __float_as_uint(rounded);
    small[i] = __float_as_uint(value - rounded);
  }
}

}  // namespace fusedconv::conv
