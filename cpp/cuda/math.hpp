// Device arithmetic shared by the convolution's epilogue and the GroupNorm kernels.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "fusedconv/types.hpp"

namespace fusedconv::device {

// The branches are uniform over the grid: the activation is one argument of the launch.
__device__ __forceinline__ float activate(Activation activation, float x) {
  switch (activation) {
    case Activation::kIdentity: return x;
    // Comparing instead of fmaxf keeps NaN, as torch does.
    case Activation::kRelu: return x < 0.0f ? 0.0f : x;
    case Activation::kGelu: return 0.5f * x * (1.0f + erff(x * 0.70710678118654752440f));
    case Activation::kGeluTanh: {
      float const inner = 0.79788456080286535588f * fmaf(0.044715f * x * x, x, x);
      return 0.5f * x * (1.0f + tanhf(inner));
    }
    case Activation::kSilu: return x / (1.0f + expf(-x));
  }
  return x;
}

template <class T>
__device__ __forceinline__ float to_float(T value) {
  return static_cast<float>(value);
}
template <>
__device__ __forceinline__ float to_float(__half value) {
  return __half2float(value);
}
template <>
__device__ __forceinline__ float to_float(__nv_bfloat16 value) {
  return __bfloat162float(value);
}

template <class T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

// Nearest, ties away from zero: what cuDNN's TF32 convolutions do to both operands. The tensor
// core itself only drops the low bits.
__device__ __forceinline__ float round_to_tf32(float value) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return __uint_as_float(bits);
}

// kCount elements moved together, by accesses of 16 bytes where there are as many.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount < 16 ? sizeof(T) * kCount : 16) Pack {
  T values[kCount];
};

// A scalar of one of the three types, read as float; for small vectors such as weight and bias.
__device__ __forceinline__ float load_as_float(void const* base, int64_t index, DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return static_cast<float const*>(base)[index];
    case DType::kFloat16: return __half2float(static_cast<__half const*>(base)[index]);
    case DType::kBFloat16: return __bfloat162float(static_cast<__nv_bfloat16 const*>(base)[index]);
  }
  return 0.0f;
}

}  // namespace fusedconv::device
