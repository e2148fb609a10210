// Products of sixteen output channels with eight quotients: eight values of the input each, four
// channels of two neighbours.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "conv/few/schedule.hpp"
#include "cuda/math.hpp"
#include "cute/arch/mma_sm80.hpp"

namespace fusedconv::conv::few {

// The quotient of the sixteen that is column `column` of a group: the two columns of the sums that
// a lane has in one group are followed by those that it has in the next.
__device__ __forceinline__ constexpr int quotient_of(int group, int column) {
  return column / 2 * 2 * kGroups + group * 2 + column % 2;
}

// What a register of the weights' operands is of: which of the products, parity along width and
// half of the channels.
struct Place {
  int product, parity, half;
};

// Lane 4 g + t has rows g and g + 8 of the weights and of the sums, column g of the inputs, and
// columns 2 t and 2 t + 1 of the sums, as the instructions have it. The weights' registers lie in
// quads. kInputs: registers of a product's inputs. kValues: of a register of the weights.
template <Math kMath>
struct Products;

template <>
struct Products<Math::kTf32> {
  using Element = float;
  static constexpr int kInputs = 2, kValues = 1;
  static constexpr bool kPairs = false;
  __device__ __forceinline__ static Element staged(float value) {
    return device::round_to_tf32(value);
  }
  __device__ __forceinline__ static Place place(int quad, int i) {
    return {quad / 2, quad % 2, i % 2};
  }
  // Which of the two neighbours and which channel meets register i's `value`-th value.
  __device__ __forceinline__ static void meets(int lane, int i, int, int& neighbour, int& channel) {
    neighbour = i / 2;
    channel = lane % 4;
  }
  // From pixels of four channels, quotient 0 of the line first.
  __device__ __forceinline__ static void load(uint32_t (&b)[kInputs], uint32_t const* pixels,
                                              int group) {
    b[0] = pixels[quotient_of(group, 0) * kMostInputs];
    b[1] = pixels[(quotient_of(group, 0) + 1) * kMostInputs];
  }
  // Words of a pixel, and where a lane's lie.
  static constexpr int kWords = kMostInputs;
  __device__ __forceinline__ static int lane_word(int lane) {
    return quotient_of(0, lane / 4) * kWords + lane % 4;
  }
  __device__ __forceinline__ static void add(float (&d)[4], uint32_t const (&a)[4],
                                             uint32_t const (&b)[2], float const (&c)[4]) {
    cute::SM80_16x8x8_F32TF32TF32F32_TN::fma(d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3], b[0],
                                             b[1], c[0], c[1], c[2], c[3]);
  }
};

// By one instruction two products: but for the first, which is one line's alone, and whose quad is
// that of both parities.
template <class T>
struct HalfProducts {
  using Element = T;
  static constexpr int kInputs = 1, kValues = 2;
  static constexpr bool kPairs = true;
  __device__ __forceinline__ static Element staged(T value) { return value; }
  __device__ __forceinline__ static Place place(int quad, int i) {
    if (quad == 0) return {0, i / 2, i % 2};
    return {1 + (quad - 1) / 2 * 2 + i / 2, (quad - 1) % 2, i % 2};
  }
  __device__ __forceinline__ static void meets(int lane, int, int value, int& neighbour,
                                               int& channel) {
    neighbour = lane % 4 / 2;
    channel = lane % 2 * 2 + value;
  }
  static constexpr int kWords = kMostInputs / 2;
  __device__ __forceinline__ static void load(uint32_t (&b)[kInputs], uint32_t const* pixels,
                                              int group) {
    b[0] = pixels[quotient_of(group, 0) * kWords];
  }
  __device__ __forceinline__ static int lane_word(int lane) {
    return quotient_of(0, lane / 4) * kWords + lane % 4;
  }
};

template <>
struct Products<Math::kBF16> : HalfProducts<__nv_bfloat16> {
  __device__ __forceinline__ static void add(float (&d)[4], uint32_t const (&a)[2],
                                             uint32_t const (&b)[1], float const (&c)[4]) {
    cute::SM80_16x8x8_F32BF16BF16F32_TN::fma(d[0], d[1], d[2], d[3], a[0], a[1], b[0], c[0], c[1],
                                             c[2], c[3]);
  }
  __device__ __forceinline__ static void add_two(float (&d)[4], uint32_t const (&a)[4],
                                                 uint32_t const (&first)[1],
                                                 uint32_t const (&second)[1], float const (&c)[4]) {
    cute::SM80_16x8x16_F32BF16BF16F32_TN::fma(d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3],
                                              first[0], second[0], c[0], c[1], c[2], c[3]);
  }
};
template <>
struct Products<Math::kF16> : HalfProducts<__half> {
  __device__ __forceinline__ static void add(float (&d)[4], uint32_t const (&a)[2],
                                             uint32_t const (&b)[1], float const (&c)[4]) {
    cute::SM80_16x8x8_F32F16F16F32_TN::fma(d[0], d[1], d[2], d[3], a[0], a[1], b[0], c[0], c[1],
                                           c[2], c[3]);
  }
  __device__ __forceinline__ static void add_two(float (&d)[4], uint32_t const (&a)[4],
                                                 uint32_t const (&first)[1],
                                                 uint32_t const (&second)[1], float const (&c)[4]) {
    cute::SM80_16x8x16_F32F16F16F32_TN::fma(d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3],
                                            first[0], second[0], c[0], c[1], c[2], c[3]);
  }
};

}  // namespace fusedconv::conv::few
