// What the kernels of both layouts do to a pixel, and how they are launched.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <type_traits>

#include "cuda/math.hpp"
#include "cuda/tile.hpp"
#include "fusedconv/check.hpp"
#include "groupnorm/affine.hpp"
#include "groupnorm/launch.hpp"
#include "groupnorm/moments.hpp"

namespace fusedconv::layernorm {

// Both layouts' kernels take these steps:
// 1. A thread loads its values,
// 2. takes the mean of its pixels' channels with the other threads of these pixels,
// 3. takes squared deviations from that, and what rounding left of the mean,
// 4. normalises and stores.
// What registers do not hold of very many channels is read again, mostly from the L2 cache.

using device::Pack;
using groupnorm::Affine;

template <class T, class U>
struct Tensors {
  T const* input;
  U* output;
  Affine affine;
  float eps;
};

// Whether a mean has a low part. Neighbouring values of 8 bits are thousands of a float mean's
// roundings apart: one float holds it.
template <class T>
constexpr bool kKeepsLow = !std::is_same_v<T, __nv_bfloat16>;

// Of one pixel: y = fma(fma(x - mean, rstd, shift), weight, bias).
struct PixelStatistics {
  float mean, rstd, shift;

  // From sums of deviations from a rounded mean, and of their squares.
  __device__ __forceinline__ static PixelStatistics of(float count, float mean, float deviations,
                                                       float squares, float eps) {
    float const low = deviations / count;
    float const m2 = fmaf(-deviations, low, squares);
    // Rounding may leave less than nothing where all channels are equal; NaN stays.
    device::Moments const moments{count, mean, low, m2 < 0.0f ? 0.0f : m2};
    float const rstd = device::reciprocal_deviation(moments, eps);
    return {mean, rstd, -low * rstd};
  }
  // From squares alone, for values of which one float holds the mean.
  __device__ __forceinline__ static PixelStatistics of(float share, float mean, float squares,
                                                       float eps) {
    device::Moments const moments{1.0f, mean, 0.0f, squares * share};
    return {mean, device::reciprocal_deviation(moments, eps), 0.0f};
  }
  template <bool kLow>
  __device__ __forceinline__ float normalized(float x, float2 const& weight_and_bias) const {
    float const value = kLow ? fmaf(x - mean, rstd, shift) : (x - mean) * rstd;
    return fmaf(value, weight_and_bias.x, weight_and_bias.y);
  }
};

__device__ __forceinline__ float2 weight_and_bias_of(Affine const& affine, int channel) {
  return make_float2(groupnorm::weight_of(affine, channel), groupnorm::bias_of(affine, channel));
}

template <class T, int kVector>
__device__ __forceinline__ void load_values(T const* source, float* values) {
  auto const pack = Pack<T, kVector>::load(source);
#pragma unroll
  for (int v = 0; v < kVector; ++v) values[v] = device::to_float(pack.values[v]);
}

template <class U, int kVector>
__device__ __forceinline__ void store_values(float const* values, U* target) {
  Pack<U, kVector> pack;
#pragma unroll
  for (int v = 0; v < kVector; ++v) pack.values[v] = device::from_float<U>(values[v]);
  pack.store(target);
}

// sum / count with the reciprocal of the count at hand. Exact where the quotient is a float, as
// that of equal values of 8 bits is: their deviations are zero.
__device__ __forceinline__ float quotient(float sum, float count, float reciprocal) {
  float const near = sum * reciprocal;
  return fmaf(fmaf(-near, count, sum), reciprocal, near);
}

// Sums over neighbouring 2^lane_bits threads, in all of them; in a fixed order.
template <int kCount>
__device__ __forceinline__ void sum_over_lanes(float (&values)[kCount], int lane_bits) {
  for (int step = 1; step < 1 << lane_bits; step *= 2) {
#pragma unroll
    for (float& value : values) value += __shfl_xor_sync(~0u, value, step);
  }
}

// Sums over the threads with the same pixels, which are 2^lane_bits apart, in all of them; in a
// fixed order. `shared` is used once between barriers.
template <int kCount>
__device__ __forceinline__ void sum_over_block(float (&values)[kCount], int lane_bits,
                                               float* shared) {
  using Sums = Pack<float, kCount>;
  for (int step = 1 << lane_bits; step < 32; step *= 2) {
#pragma unroll
    for (float& value : values) value += __shfl_xor_sync(~0u, value, step);
  }
  int const warps = int(blockDim.x) / 32;
  if (warps == 1) return;
  int const lane = int(threadIdx.x) & ((1 << lane_bits) - 1);
  if (int(threadIdx.x) % 32 >> lane_bits == 0) {
    Sums sums;
#pragma unroll
    for (int v = 0; v < kCount; ++v) sums.values[v] = values[v];
    sums.store(shared + (int(threadIdx.x) / 32 << lane_bits | lane) * kCount);
  }
  __syncthreads();
#pragma unroll
  for (float& value : values) value = 0.0f;
#pragma unroll 4
  for (int warp = 0; warp < warps; ++warp) {
    auto const sums = Sums::load(shared + (warp << lane_bits | lane) * kCount);
#pragma unroll
    for (int v = 0; v < kCount; ++v) values[v] += sums.values[v];
  }
}

inline int bits_for(int64_t wanted) { return std::bit_width(uint64_t(wanted - 1)); }

// Whether accesses of `vector` elements may run along an axis of `extent`.
template <class T, class U>
bool serves(Tensors<T, U> const& tensors, int64_t extent, int64_t vector) {
  return extent % vector == 0 && device::is_aligned(tensors.input, vector * int64_t(sizeof(T))) &&
         device::is_aligned(tensors.output, std::min<int64_t>(vector * sizeof(U), 16));
}

// Calls body with Tensors of the problem's dtypes.
template <class F>
void dispatch_tensors(GroupNormProblem const& p, GroupNormTensors const& given, F&& body) {
  auto const call = [&](auto in, auto out) {
    using T = decltype(in);
    using U = decltype(out);
    body(Tensors<T, U>{.input = static_cast<T const*>(given.input),
                       .output = static_cast<U*>(given.output),
                       .affine = groupnorm::affine_of(p, given.weight, given.bias, nullptr),
                       .eps = float(p.eps)});
  };
  device::dispatch_type(p.dtype, [&](auto zero) {
    if (p.output_dtype == p.dtype) return call(zero, zero);
    if constexpr (!std::is_same_v<decltype(zero), float>) call(zero, 0.0f);
  });
}

}  // namespace fusedconv::layernorm
