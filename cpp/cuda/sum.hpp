// Sums over warps and blocks, in a fixed order.
#pragma once

#include <cstdint>

namespace fusedconv::device {

// Over each kLanes lanes; the same in every one of them.
template <int kLanes = 32>
__device__ __forceinline__ float warp_total(float value) {
#pragma unroll
  for (int lane = kLanes / 2; lane > 0; lane /= 2) value += __shfl_xor_sync(~0u, value, lane);
  return value;
}

// The same in every thread of a block of kThreads, all of which call it, and once only.
template <int kThreads>
__device__ __forceinline__ float block_total(float value) {
  constexpr int kWarps = kThreads / 32;
  static_assert(kWarps <= 32, "one warp adds up the others'");
  __shared__ float warps[kWarps];
  value = warp_total(value);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  int const lane = threadIdx.x % 32;
  return warp_total(lane < kWarps ? warps[lane] : 0.0f);
}

// Of a block of 32 times kSlices threads, all of which call it once: for each of 32 neighbouring
// numbers its sum over `parts`, `stride` numbers apart, in the first slice of threads. `number` is
// the thread's first, null where it has none.
template <int kSlices>
__device__ __forceinline__ float total_of_parts(float const* number, int parts, int64_t stride) {
  __shared__ float slices[kSlices][32];
  int const lane = int(threadIdx.x) % 32, slice = int(threadIdx.x) / 32;
  float total = 0.0f;
  if (number != nullptr) {
#pragma unroll 4
    for (int part = slice; part < parts; part += kSlices) total += number[part * stride];
  }
  slices[slice][lane] = total;
  __syncthreads();
  if (slice != 0) return total;
#pragma unroll
  for (int i = 1; i < kSlices; ++i) total += slices[i][lane];
  return total;
}

}  // namespace fusedconv::device
