// What the consuming warpgroups share: where their operands are, and where their sums go.
#pragma once

#include <cstdint>

#include "conv/sm90/partial_sums.hpp"
#include "conv/sm90/wgrad/params.hpp"
#include "conv/sm90/wgrad/traits.hpp"
#include "cute/arch/mma_sm90_desc.hpp"

namespace fusedconv::conv::sm90::wgrad {

// Lines of a strip, a channel each, as copies with a swizzle of as many bytes leave them.
template <class Traits>
__device__ __forceinline__ uint64_t input_operand(uint32_t address) {
  cute::GmmaDescriptor result;
  result.bitfield.start_address_ = uint16_t(address >> 4);
  result.bitfield.leading_byte_offset_ = 1;
  result.bitfield.stride_byte_offset_ = 8 * Traits::kStripBytes >> 4;
  result.bitfield.layout_type_ =
      uint8_t(Traits::kHalves == 1 ? gmma::LayoutType::B64 : gmma::LayoutType::B128);
  return result.desc_;
}

// A lane's words of half a strip of the gradient: of each of two instructions its two rows and, of
// each row, two positions.
inline constexpr int kHalfWords = 8;

// From the lane's first word in a line to its i-th.
__device__ __forceinline__ uint32_t word_offset(int half, int i, int pitch) {
  return half * kHalfStripBytes + i / 4 * 32 + (i & 2) * 8 + (i & 1) * 8 * pitch;
}

// A lane's first word in the first stage.
template <class Traits>
__device__ __forceinline__ uint32_t own_grad(Params const& p, Memory const& memory, int warpgroup) {
  int const lane = threadIdx.x % 32;
  int const warp = threadIdx.x % kWarpgroupThreads / 32;
  int const group = p.groups > 1 ? warpgroup : 0;
  int const column = warpgroup - group;
  int const channel = group * kBlock + warp * 16 + lane / 4;
  int const shift = (p.lead + column - p.pad_w) * Traits::kElementBytes / 4;  // in words
  return memory.grad + channel * p.pitch_bytes + (shift + lane % 4) * 4;
}

// Where a thread adds up its accumulators.
template <class Traits>
class OwnPartials {
 public:
  __device__ __forceinline__ OwnPartials(Params const& p, BlockWork const& work, int warpgroup)
      : target_(
            reinterpret_cast<float4*>(p.partials + partial_index(p, work.task, work.split,
                                                                 warpgroup, Traits::kFilterRows)) +
            threadIdx.x % kWarpgroupThreads) {}

  // Of the filter's rows, the last first; leaves zeros.
  __device__ __forceinline__ void add(float (&sums)[Traits::kAccumulators]) {
    constexpr int kFours = Traits::kRowAccumulators / 4;
#pragma unroll
    for (int i = 0; i < Traits::kAccumulators / 4; ++i) {
      float* const four = sums + 4 * i;
      int const row = Traits::kFilterRows - 1 - i / kFours;
      leave_sums(target_ + (row * kFours + i % kFours) * kWarpgroupThreads,
                 make_float4(four[0], four[1], four[2], four[3]), first_);
      four[0] = four[1] = four[2] = four[3] = 0.0f;
    }
    first_ = false;
  }

 private:
  float4* target_;
  bool first_ = true;
};

}  // namespace fusedconv::conv::sm90::wgrad
