// Count, mean and sum of squared deviations, merged without ever subtracting large squares.
#pragma once

namespace fusedconv::device {

// The moments of a set of values. Two sets merge by the pairwise formula of Chan, Golub and LeVeque
// (1983, "Algorithms for computing the sample variance"), which stays exact for large means.
struct Moments {
  float count = 0.0f;
  float mean = 0.0f;
  float m2 = 0.0f;

  __device__ __forceinline__ void merge(Moments const& other) {
    if (other.count > 0.0f) merge(other, weight_of(count, other.count));
  }

  // The share of the added set. An approximate quotient suffices, since it scales a difference of
  // means; but the first set into an empty one must arrive whole.
  __device__ __forceinline__ static float weight_of(float count, float added) {
    return count == 0.0f ? 1.0f : __fdividef(added, count + added);
  }

  // With weight_of() the two counts, where several merges share it.
  __device__ __forceinline__ void merge(Moments const& other, float weight) {
    float const delta = other.mean - mean;
    m2 += fmaf(delta * delta, count * weight, other.m2);
    mean = fmaf(delta, weight, mean);
    count += other.count;
  }

  __device__ __forceinline__ Moments shuffled_down(int offset) const {
    return {__shfl_down_sync(~0u, count, offset), __shfl_down_sync(~0u, mean, offset),
            __shfl_down_sync(~0u, m2, offset)};
  }
};

// 1 / sqrt(variance + eps). The instruction's two units of error would be in every element of the group;
// a Newton step leaves less than one. Infinity and NaN stay as the instruction gives them.
__device__ __forceinline__ float reciprocal_deviation(Moments const& total, float eps) {
  float const value = total.m2 / total.count + eps;
  float const estimate = rsqrtf(value);
  float const residual = fmaf(-value * estimate, estimate, 1.0f);
  return residual == residual ? fmaf(0.5f * estimate, residual, estimate) : estimate;
}

// The moments of kCount values held in registers: exact two-pass arithmetic, no divisions.
template <int kCount>
__device__ __forceinline__ Moments moments_of(float const (&values)[kCount]) {
  float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i % 4] += values[i];
  float const mean = ((sums[0] + sums[1]) + (sums[2] + sums[3])) * (1.0f / kCount);
  float squares[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    float const deviation = values[i] - mean;
    squares[i % 4] = fmaf(deviation, deviation, squares[i % 4]);
  }
  return {float(kCount), mean, (squares[0] + squares[1]) + (squares[2] + squares[3])};
}

// Merges over the block's threads in a fixed tree; the result is valid in thread 0.
template <int kThreads>
__device__ __forceinline__ Moments merge_block(Moments value) {
  constexpr int kWarps = kThreads / 32;
  static_assert(kThreads % 32 == 0 && kWarps <= 32, "the last level is one warp");
  __shared__ Moments shared[kWarps];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value.merge(value.shuffled_down(offset));
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x < 32) {
    value = threadIdx.x < kWarps ? shared[threadIdx.x] : Moments{};
#pragma unroll
    for (int offset = kWarps / 2; offset > 0; offset /= 2) value.merge(value.shuffled_down(offset));
  }
  return value;
}

}  // namespace fusedconv::device
