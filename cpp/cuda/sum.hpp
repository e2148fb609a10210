// Sums over warps and blocks, in a fixed order.
#pragma once

namespace fusedconv::device {

// The same in every lane.
__device__ __forceinline__ float warp_total(float value) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) value += __shfl_xor_sync(~0u, value, lane);
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

}  // namespace fusedconv::device
