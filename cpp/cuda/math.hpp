// Device arithmetic shared by the convolution's epilogue and the GroupNorm kernels.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/pair.hpp"
#include "fusedconv/types.hpp"

namespace fusedconv::device {

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

// What is read back of a value that is stored. Moments of anything else than what is normalised
// leave a difference of the size of a rounding, which a group of equal values multiplies by
// 1 / sqrt(eps).
template <class T>
__device__ __forceinline__ float as_stored(float value) {
  return to_float(from_float<T>(value));
}

// Nearest, ties to even: what cuDNN's TF32 convolutions do to both operands. The tensor core itself
// only drops the low bits.
__device__ __forceinline__ float round_to_tf32(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t rounded;
  asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(value));
  return __uint_as_float(rounded);
#else
  // A carry into the exponent is right: the largest values become infinity, which has no bits that
  // carry. What is left of a NaN might be infinity or zero.
  uint32_t const bits = __float_as_uint(value);
  uint32_t const rounded = (bits + 0xfffu + (bits >> 13 & 1u)) & 0xffffe000u;
  return __uint_as_float(value == value ? rounded : 0x7fffffffu);
#endif
}

// The big part of a float for 3xTF32: to nearest, so that what is left has either sign and 12 bits
// at most. How ties go does not matter: the small part makes up for it. A NaN may turn into zero
// here, and then survives in the small part.
__device__ __forceinline__ float big_tf32(float value) {
  return __uint_as_float((__float_as_uint(value) + 0x1000u) & 0xffffe000u);
}

// kCount elements moved by accesses as wide as they are together, 16 bytes at most. Going through
// integers of that width keeps the compiler from splitting an access into its elements.
template <class T, int kCount>
struct Pack {
  static constexpr int kBytes = int(sizeof(T)) * kCount;
  using Word = std::conditional_t<
      (kBytes >= 16), uint4,
      std::conditional_t<kBytes == 8, uint2, std::conditional_t<kBytes == 4, uint32_t, uint16_t>>>;
  static constexpr int kWords = kBytes / int(sizeof(Word));
  static_assert(kWords * int(sizeof(Word)) == kBytes, "a power of two of bytes");

  union {
    T values[kCount];
    Word words[kWords];
    uint32_t bits[(kBytes + 3) / 4];
  };

  __device__ __forceinline__ Pack() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = Word{};
  }
  __device__ __forceinline__ static Pack load(T const* source) {
    Pack result;
#pragma unroll
    for (int i = 0; i < kWords; ++i) result.words[i] = reinterpret_cast<Word const*>(source)[i];
    return result;
  }
  // Rounded, pairs of 16 bits by one conversion.
  __device__ __forceinline__ static Pack of(float const (&values)[kCount]) {
    Pack result;
    if constexpr (sizeof(T) == 2 && kCount % 2 == 0) {
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) {
        result.bits[i] = from_pair<T>(values[2 * i], values[2 * i + 1]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) result.values[i] = from_float<T>(values[i]);
    }
    return result;
  }
  // Two values of 16 bits take an instruction each, where one by itself is extracted first.
  __device__ __forceinline__ void to_floats(float (&result)[kCount]) const {
    if constexpr (sizeof(T) == 2 && kCount % 2 == 0) {
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) {
        float2 const pair = to_pair<T>(bits[i]);
        result[2 * i] = pair.x;
        result[2 * i + 1] = pair.y;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) result[i] = to_float(values[i]);
    }
  }
  // Makes the compiler convert the values anew after this point. Else a kernel that goes over its
  // packs more than once keeps 16-bit values as floats, in twice the registers.
  __device__ __forceinline__ void forget() {
    if constexpr (sizeof(T) == 2 && kBytes >= 4) {
#pragma unroll
      for (uint32_t& word : bits) asm volatile("" : "+r"(word));
    }
  }
  __device__ __forceinline__ void store(T* target) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) reinterpret_cast<Word*>(target)[i] = words[i];
  }
};

// A scalar of one of the three types, for small vectors such as weight and bias: as it lies, and
// what it is.
__device__ __forceinline__ uint32_t load_bits(void const* base, int64_t index, DType dtype) {
  if (dtype == DType::kFloat32) return static_cast<uint32_t const*>(base)[index];
  return static_cast<uint16_t const*>(base)[index];
}
__device__ __forceinline__ float float_of_bits(uint32_t bits, DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return __uint_as_float(bits);
    case DType::kFloat16: return __half2float(__ushort_as_half(uint16_t(bits)));
    case DType::kBFloat16: return __uint_as_float(bits << 16);
  }
  return 0.0f;
}

// The same, read as float.
__device__ __forceinline__ float load_as_float(void const* base, int64_t index, DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return static_cast<float const*>(base)[index];
    case DType::kFloat16: return __half2float(static_cast<__half const*>(base)[index]);
    case DType::kBFloat16: return __bfloat162float(static_cast<__nv_bfloat16 const*>(base)[index]);
  }
  return 0.0f;
}

}  // namespace fusedconv::device
