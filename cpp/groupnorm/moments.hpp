// Count, mean and sum of squared deviations, merged without ever subtracting large squares.
#pragma once

#include <cstdint>

#include "cuda/sum.hpp"
#include "groupnorm/statistics.hpp"

namespace fusedconv::device {

// A sum as a float, and what rounding took from it: exactly (Knuth's TwoSum), or where |a| < |b| to
// a rounding of b in half the operations (Dekker's FastTwoSum).
__device__ __forceinline__ float2 two_sum(float a, float b) {
  float const sum = a + b;
  float const added = sum - a;
  return {sum, (a - (sum - added)) + (b - added)};
}
__device__ __forceinline__ float2 fast_two_sum(float a, float b) {
  float const sum = a + b;
  return {sum, b - (sum - a)};
}

// Moments of which the mean is counted from a reference that lies among the values: what the means
// of parts of a group differ by one float holds, and a merge is a short chain of operations.
struct RelativeMoments {
  float count = 0.0f;
  float offset = 0.0f;
  float m2 = 0.0f;

  __device__ __forceinline__ void merge(RelativeMoments const& other) {
    if (other.count > 0.0f) {
      float const weight = count == 0.0f ? 1.0f : __fdividef(other.count, count + other.count);
      float const delta = other.offset - offset;
      m2 += fmaf(delta * delta, count * weight, other.m2);
      offset = fmaf(delta, weight, offset);
      count += other.count;
    }
  }
};

// The moments of a set of values; their mean is mean + low. Two sets merge by the pairwise formula
// of Chan, Golub and LeVeque (1983, "Algorithms for computing the sample variance"), which stays
// exact for large means.
struct Moments {
  float count = 0.0f;
  float mean = 0.0f;
  float low = 0.0f;
  float m2 = 0.0f;

  __device__ __forceinline__ static Moments of(groupnorm::Partial const& part) {
    return {part.count, part.mean, part.low, part.m2};
  }
  __device__ __forceinline__ static Moments of(float reference, RelativeMoments const& part) {
    return {part.count, reference, part.offset, part.m2};
  }
  __device__ __forceinline__ RelativeMoments about(float reference) const {
    return {count, (mean - reference) + low, m2};
  }
  __device__ __forceinline__ groupnorm::Partial partial() const { return {count, mean, low, m2}; }

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
    float const high_delta = other.mean - mean;
    float const low_delta = other.low - low;
    float const delta = high_delta + low_delta;
    m2 += fmaf(delta, delta * (count * weight), other.m2);
    float2 const sum = two_sum(mean, __fmul_rn(high_delta, weight));
    mean = sum.x;
    low = fmaf(low_delta, weight, low) + sum.y;
    count += other.count;
  }

  // Merges values held in registers, in one pass over them: as deviations from `mean`, which stays
  // what it was at first, about the mean of the first values, while `low` follows the rest. That is
  // off the mean of all by a few deviations at most, so that the difference of squares loses a few
  // roundings.
  template <int kCount>
  __device__ __forceinline__ void add(float const (&values)[kCount]) {
    if (count == 0.0f) {
      float first = 0.0f;
#pragma unroll
      for (int i = 0; i < kCount; ++i) first = fmaf(values[i], 1.0f / kCount, first);
      mean = first;
    }
    add(values, weight_of(count, float(kCount)));
  }
  // The same, where the caller has set `mean` before the first values to one of them.
  template <int kCount>
  __device__ __forceinline__ void add(float const (&values)[kCount], float weight) {
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    float squares[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float const deviation = values[i] - mean;
      sums[i % 4] += deviation;
      squares[i % 4] = fmaf(deviation, deviation, squares[i % 4]);
    }
    float const sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    float const offset = sum * (1.0f / kCount);
    float const delta = offset - low;
    float const own = fmaf(-sum, offset, (squares[0] + squares[1]) + (squares[2] + squares[3]));
    m2 += fmaf(delta, delta * (count * weight), own);
    low = fmaf(delta, weight, low);
    count += float(kCount);
  }
};

// The moments of `count` values from their sums about a shift that is one of them, for which the
// reason is that of Moments::add().
__device__ __forceinline__ Moments shifted_moments(float count, float shift, float sum,
                                                   float squares) {
  float const offset = sum / count;
  float2 const mean = fast_two_sum(shift, offset);
  return {count, mean.x, mean.y, fmaf(-sum, offset, squares)};
}

// Sums about a shift that is one of the values, so that a large mean costs no precision.
struct ShiftedMoments {
  float shift = 0.0f;
  float sum = 0.0f;
  float squares = 0.0f;

  __device__ __forceinline__ void add(float value) {
    float const deviation = value - shift;
    sum += deviation;
    squares = fmaf(deviation, deviation, squares);
  }
  __device__ __forceinline__ Moments moments(int count) const {
    return count == 0 ? Moments{} : shifted_moments(float(count), shift, sum, squares);
  }
};

// 1 / sqrt(variance + eps). The instruction's two units of error would be in every element of the
// group; a Newton step leaves less than one. Infinity and NaN stay as the instruction gives them.
__device__ __forceinline__ float reciprocal_deviation(Moments const& total, float eps) {
  float const value = total.m2 / total.count + eps;
  float const estimate = rsqrtf(value);
  float const residual = fmaf(-value * estimate, estimate, 1.0f);
  return residual == residual ? fmaf(0.5f * estimate, residual, estimate) : estimate;
}

__device__ __forceinline__ groupnorm::Statistics statistics_of(Moments const& total, float eps) {
  float2 const mean = two_sum(total.mean, total.low);
  return {mean.x, mean.y, reciprocal_deviation(total, eps)};
}

__device__ __forceinline__ void store(groupnorm::StatisticsTargets const& targets, int64_t group,
                                      groupnorm::Statistics const& statistics) {
  if (targets.statistics != nullptr) targets.statistics[group] = statistics;
  if (targets.mean != nullptr) targets.mean[group] = statistics.mean;
  if (targets.rstd != nullptr) targets.rstd[group] = statistics.rstd;
}

// Merges over each kLanes lanes of a warp in a fixed order; the results are valid in every one of
// them. In two passes, about the mean of the first lane that has values and about what that gives:
// the lane's may be one of few parts and far off the others, and their distances from it would
// round the mean at each level of a tree.
template <int kLanes = 32>
__device__ __forceinline__ Moments merge_warp(Moments const& value) {
  constexpr unsigned kMask = kLanes == 32 ? ~0u : (1u << kLanes % 32) - 1;
  unsigned const base = threadIdx.x % 32 / kLanes * kLanes;
  bool const any = value.count > 0.0f;  // else its mean says nothing
  unsigned const filled = __ballot_sync(~0u, any) >> base & kMask;
  float const reference = __shfl_sync(~0u, value.mean, max(__ffs(int(filled)) - 1, 0), kLanes);
  float const count = warp_total<kLanes>(value.count);
  auto const share = [&](float sum) { return count > 0.0f ? __fdividef(sum, count) : 0.0f; };
  float const offset = value.about(reference).offset;
  float const sum = warp_total<kLanes>(any ? value.count * offset : 0.0f);
  float2 const mean = two_sum(reference, share(sum));
  float const delta = any ? (value.mean - mean.x) + (value.low - mean.y) : 0.0f;
  // What roundings, and the approximate quotient, leave of the sum.
  float const left = warp_total<kLanes>(value.count * delta);
  float const m2 = warp_total<kLanes>(fmaf(delta * delta, value.count, value.m2));
  float const rest = share(left);
  return {count, mean.x, mean.y + rest, fmaf(-left, rest, m2)};
}

// Merges over the block's threads in a fixed tree; the result is valid in thread 0.
template <int kThreads>
__device__ __forceinline__ Moments merge_block(Moments value) {
  constexpr int kWarps = kThreads / 32;
  static_assert(kThreads % 32 == 0 && kWarps <= 32, "the last level is one warp");
  __shared__ Moments shared[kWarps];
  value = merge_warp(value);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x < 32) {
    value = merge_warp<kWarps>(threadIdx.x < kWarps ? shared[threadIdx.x] : Moments{});
  }
  return value;
}

}  // namespace fusedconv::device
