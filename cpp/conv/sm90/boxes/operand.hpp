// The instruction's operands in shared memory, and its call.
#pragma once

#include <cstdint>
#include <utility>

#include "conv/sm90/boxes/traits.hpp"
#include "cute/arch/mma_sm90_desc.hpp"

namespace fusedconv::conv::sm90::boxes {

// leading, stride: bytes, as the layout has them.
__device__ __forceinline__ uint64_t operand(uint32_t address, gmma::LayoutType layout, int leading,
                                            int stride) {
  cute::GmmaDescriptor result;
  result.bitfield.start_address_ = uint16_t(address >> 4);
  result.bitfield.leading_byte_offset_ = uint16_t(leading >> 4);
  result.bitfield.stride_byte_offset_ = uint16_t(stride >> 4);
  result.bitfield.layout_type_ = uint8_t(layout);
  return result.desc_;
}

template <class Mma, int... kIndex>
__device__ __forceinline__ void multiply(uint64_t a, uint64_t b, float (&sums)[sizeof...(kIndex)],
                                         std::integer_sequence<int, kIndex...>) {
  Mma::fma(a, b, sums[kIndex]...);
}

}  // namespace fusedconv::conv::sm90::boxes
