// Operands of the tensor cores: positions as registers, taps of the filter as descriptors.
//
// Of each quad of positions that a lane group owns, instruction i takes position i in the rows of
// its first half and position i + 2 in those of its second. So four registers hold positions p and
// p + 2 of a lane's channels, and the same four are tap t of instruction i wherever i + t is p: a
// shift by a tap costs nothing, whatever its alignment.
#pragma once

#include <cstdint>

#include "conv/sm90/runs/traits.hpp"
#include "cuda/math.hpp"
#include "cute/arch/mma_sm90_desc.hpp"

namespace fusedconv::conv::sm90::runs {

// K-major core matrices of 8 rows times 16 bytes without swizzle.
__device__ __forceinline__ uint64_t filter_operand(uint32_t address) {
  cute::GmmaDescriptor result;
  result.bitfield.start_address_ = uint16_t(address >> 4);
  result.bitfield.leading_byte_offset_ = kBlockN;
  result.bitfield.stride_byte_offset_ = 8;
  result.bitfield.layout_type_ = uint8_t(gmma::LayoutType::INTERLEAVE);
  return result.desc_;
}

// A lane's positions of half of its channels, as they are loaded. Lane t of four supplies channels
// 2 t and 2 t + 1 (32-bit elements, one a half) or 2 t, 2 t + 1 and the eighth after each (16-bit
// elements, two a half); pitch: bytes from a channel to the next.
template <int kElementBytes, int kBefore, int kAfter>
struct Run;

template <int kBefore, int kAfter>
struct Run<4, kBefore, kAfter> {
  static constexpr int kRegisters = kBefore + kAfter + 2;
  uint32_t values[kBefore + kQuad + kAfter];

  __device__ __forceinline__ void load(uint32_t quad, int pitch, int half) {
    uint32_t const at = quad + half * pitch;
    if constexpr (kBefore == 2) {
      asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                   : "=r"(values[0]), "=r"(values[1])
                   : "r"(at - 8));
    } else if constexpr (kBefore == 1) {
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(values[0]) : "r"(at - 4));
    }
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(values[kBefore]), "=r"(values[kBefore + 1]), "=r"(values[kBefore + 2]),
                   "=r"(values[kBefore + 3])
                 : "r"(at));
    if constexpr (kAfter == 2) {
      asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                   : "=r"(values[kBefore + 4]), "=r"(values[kBefore + 5])
                   : "r"(at + 16));
    } else if constexpr (kAfter == 1) {
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(values[kBefore + 4]) : "r"(at + 16));
    }
  }

  // In two parts, for 3xTF32. What the small part has beyond TF32's bits is not worth rounding.
  // It is made in the operands themselves, which takes no masks.
  __device__ __forceinline__ void split(uint32_t (&big)[kRegisters][4],
                                        uint32_t (&small)[kRegisters][4], int half) const {
    uint32_t wide[kBefore + kQuad + kAfter];
#pragma unroll
    for (int c = 0; c < kRegisters + 2; ++c) {
      wide[c] = __float_as_uint(device::big_tf32(__uint_as_float(values[c])));
    }
    put(wide, big, half);
#pragma unroll
    for (int p = 0; p < kRegisters; ++p) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        asm volatile("sub.rn.f32 %0, %1, %2;"
                     : "=r"(small[p][2 * half + i])
                     : "r"(values[p + 2 * i]), "r"(wide[p + 2 * i]));
      }
    }
  }
  __device__ __forceinline__ void put(uint32_t (&operands)[kRegisters][4], int half) const {
    put(values, operands, half);
  }

 private:
  // The mask changes nothing, as the elements are rounded to TF32. But a move would be left out,
  // and loads would go to registers that products in flight still read; and the units that mask are
  // not those that multiply.
  __device__ __forceinline__ static void put(uint32_t const (&columns)[kRegisters + 2],
                                             uint32_t (&operands)[kRegisters][4], int half) {
#pragma unroll
    for (int p = 0; p < kRegisters; ++p) {
      asm volatile("and.b32 %0, %1, 0xffffe000;" : "=r"(operands[p][2 * half]) : "r"(columns[p]));
      asm volatile("and.b32 %0, %1, 0xffffe000;"
                   : "=r"(operands[p][2 * half + 1])
                   : "r"(columns[p + 2]));
    }
  }
};

template <int kBefore, int kAfter>
struct Run<2, kBefore, kAfter> {
  static constexpr int kRegisters = kBefore + kAfter + 2;
  static constexpr int kWordsBefore = (kBefore + 1) / 2;
  static constexpr int kWordsAfter = (kAfter + 1) / 2;
  uint32_t words[2][kWordsBefore + 2 + kWordsAfter];  // two columns of a channel each

  __device__ __forceinline__ void load(uint32_t quad, int pitch, int half) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      uint32_t const at = quad + (half * 8 + c) * pitch;
      if constexpr (kWordsBefore > 0) {
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(words[c][0]) : "r"(at - 4));
      }
      asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                   : "=r"(words[c][kWordsBefore]), "=r"(words[c][kWordsBefore + 1])
                   : "r"(at));
      if constexpr (kWordsAfter > 0) {
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(words[c][kWordsBefore + 2]) : "r"(at + 8));
      }
    }
  }

  __device__ __forceinline__ void put(uint32_t (&operands)[kRegisters][4], int half) const {
#pragma unroll
    for (int p = 0; p < kRegisters; ++p) {
      operands[p][2 * half] = channels_of(p);
      operands[p][2 * half + 1] = channels_of(p + 2);
    }
  }

 private:
  // The two channels of a position, counted from the first that the window reads.
  __device__ __forceinline__ uint32_t channels_of(int position) const {
    int const column = position + 2 * kWordsBefore - kBefore;
    uint32_t result;
    if (column % 2 == 0) {
      asm volatile("prmt.b32 %0, %1, %2, 0x5410;"
                   : "=r"(result)
                   : "r"(words[0][column / 2]), "r"(words[1][column / 2]));
    } else {
      asm volatile("prmt.b32 %0, %1, %2, 0x7632;"
                   : "=r"(result)
                   : "r"(words[0][column / 2]), "r"(words[1][column / 2]));
    }
    return result;
  }
};

}  // namespace fusedconv::conv::sm90::runs
