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

// Rows of a chunk's channels, swizzled as tensor copies swizzle them, 8 rows after another.
// The pattern is that of addresses, so that rows may begin anywhere.
__device__ __forceinline__ uint64_t rows_operand(uint32_t address,
                                                 int eights_bytes = 8 * kChunkBytes) {
  return operand(address, gmma::LayoutType::B128, 0, eights_bytes);
}

// Lines of so many bytes, a slab's or a filter's, each for all channels of a chunk in turn.
template <class Traits>
__device__ __forceinline__ uint64_t lines_operand(uint32_t address, int line_bytes) {
  int const line = Traits::kChunk * line_bytes, eight = 8 * line_bytes;
  switch (line_bytes) {
    case 128: return operand(address, gmma::LayoutType::B128, line, eight);
    case 64: return operand(address, gmma::LayoutType::B64, line, eight);
    case 32: return operand(address, gmma::LayoutType::B32, line, eight);
    default: return operand(address, gmma::LayoutType::INTERLEAVE, eight, line);
  }
}

// Of `sums` the first kIndex.
template <class Mma, int kSums, int... kIndex>
__device__ __forceinline__ void multiply(uint64_t a, uint64_t b, float (&sums)[kSums],
                                         std::integer_sequence<int, kIndex...>) {
  Mma::fma(a, b, sums[kIndex]...);
}

}  // namespace fusedconv::conv::sm90::boxes
