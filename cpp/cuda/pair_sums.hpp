// Sums of pairs of half precision over a warp's fours of lanes, in float32 by a tensor core, which
// takes pairs as they are.
#pragma once

#include <cstdint>

namespace fusedconv::device {

// One product of matrices, added: a pair of each lane's is of row lane / 4 of the first, or of row
// lane / 4 + 8, or of column lane / 4 of the second.
__device__ __forceinline__ void multiply_pairs(float (&sums)[4], uint32_t row, uint32_t row_below,
                                               uint32_t column) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(row), "r"(row_below), "r"(column));
}

// With a second matrix of ones: each element becomes a sum of two pairs of four lanes.
__device__ __forceinline__ void sum_pairs(float (&sums)[4], uint32_t const (&rows)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %8}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "r"(0x3c003c00u));
}

// Of lanes 4 r to 4 r + 3, whose products are elements (r, r) and (r + 8, r); the others are lost.
// All lanes of a warp add at once.
class PairSums {
 public:
  // Four pairs each, as few moves as that leaves.
  __device__ __forceinline__ void add(uint32_t const (&a)[4], uint32_t const (&b)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      multiply_pairs(above_, a[i], a[i + 1], b[i]);
      multiply_pairs(below_, a[i], a[i + 1], b[i + 1]);
    }
    sum_pairs(sums_, b);
  }
  // Of others, which begin at zero so that each has few summands: within products of matrices sums
  // are cut, not rounded.
  __device__ __forceinline__ void add(PairSums const& other) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      above_[i] += other.above_[i];
      below_[i] += other.below_[i];
      sums_[i] += other.sums_[i];
    }
  }
  // Of all lanes of a warp: whether no number of theirs is infinite or none.
  __device__ __forceinline__ bool are_finite() const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += above_[i] + below_[i];
    return __all_sync(~0u, sum - sum == 0.0f);
  }

  // The same in each of four lanes: of products a b, and of b.
  __device__ __forceinline__ float2 totals() const {
    int const row = int(threadIdx.x) % 32 / 4;
    int const source = row * 4 + row / 2;  // has columns 2 (lane % 4) and the next one
    float const odd = above_[1] + below_[3], even = above_[0] + below_[2];
    return {__shfl_sync(~0u, row % 2 != 0 ? odd : even, source), sums_[0] + sums_[2]};
  }

 private:
  float above_[4] = {}, below_[4] = {}, sums_[4] = {};
};

}  // namespace fusedconv::device
