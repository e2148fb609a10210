// Products of sixteen neighbouring quotients with eight output channels: eight values of the input
// each, four channels of two neighbours.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "conv/few/schedule.hpp"
#include "cuda/math.hpp"
#include "cute/arch/mma_sm80.hpp"

namespace fusedconv::conv::few {

// Lane 4 g + t has rows g and g + 8 and column g of the operands, and columns 2 t and 2 t + 1 of
// the sums, as the instructions have it. kInputs, kWeights: registers of the operands.
template <Math kMath>
struct Products;

template <>
struct Products<Math::kTf32> {
  using Element = float;
  static constexpr int kInputs = 4, kWeights = 2;
  __device__ __forceinline__ static Element staged(float value) {
    return device::round_to_tf32(value);
  }
  // Value `row` of the lane's of a weight's operand: which of the two neighbours it is of, and
  // which channel.
  __device__ __forceinline__ static void place(int lane, int i, int& neighbour, int& channel) {
    neighbour = i;
    channel = lane % 4;
  }
  static constexpr int kPerRegister = 1;
  // From pixels of four channels, quotient 0 of the line first.
  __device__ __forceinline__ static void load(uint32_t (&a)[kInputs], Element const* pixels,
                                              int lane) {
    uint32_t const* const words =
        reinterpret_cast<uint32_t const*>(pixels) + lane / 4 * kMostInputs + lane % 4;
    a[0] = words[0];
    a[1] = words[8 * kMostInputs];
    a[2] = words[kMostInputs];
    a[3] = words[9 * kMostInputs];
  }
  __device__ __forceinline__ static void add(float (&d)[4], uint32_t const (&a)[kInputs],
                                             uint32_t const (&b)[kWeights], float const (&c)[4]) {
    cute::SM80_16x8x8_F32TF32TF32F32_TN::fma(d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3], b[0],
                                             b[1], c[0], c[1], c[2], c[3]);
  }
};

template <class T>
struct HalfProducts {
  using Element = T;
  static constexpr int kInputs = 2, kWeights = 1;
  static constexpr int kPerRegister = 2;
  __device__ __forceinline__ static Element staged(T value) { return value; }
  __device__ __forceinline__ static void place(int lane, int i, int& neighbour, int& channel) {
    neighbour = lane % 4 / 2;
    channel = lane % 2 * 2 + i;
  }
  __device__ __forceinline__ static void load(uint32_t (&a)[kInputs], Element const* pixels,
                                              int lane) {
    // Two words a pixel.
    uint32_t const* const words =
        reinterpret_cast<uint32_t const*>(pixels) + lane / 4 * 2 + lane % 4;
    a[0] = words[0];
    a[1] = words[8 * 2];
  }
};

template <>
struct Products<Math::kBF16> : HalfProducts<__nv_bfloat16> {
  __device__ __forceinline__ static void add(float (&d)[4], uint32_t const (&a)[2],
                                             uint32_t const (&b)[1], float const (&c)[4]) {
    cute::SM80_16x8x8_F32BF16BF16F32_TN::fma(d[0], d[1], d[2], d[3], a[0], a[1], b[0], c[0], c[1],
                                             c[2], c[3]);
  }
};
template <>
struct Products<Math::kF16> : HalfProducts<__half> {
  __device__ __forceinline__ static void add(float (&d)[4], uint32_t const (&a)[2],
                                             uint32_t const (&b)[1], float const (&c)[4]) {
    cute::SM80_16x8x8_F32F16F16F32_TN::fma(d[0], d[1], d[2], d[3], a[0], a[1], b[0], c[0], c[1],
                                           c[2], c[3]);
  }
};

}  // namespace fusedconv::conv::few
