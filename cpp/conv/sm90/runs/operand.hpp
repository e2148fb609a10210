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

// Where quads may be staggered: a quad and the two columns before it are, as they lie, a whole quad
// and a half, of which the half comes first, or last where the quad is staggered.
struct Stagger {
  int beside;     // elements from the whole one to the half
  uint32_t mask;  // of bits: whether the lane's quad is staggered

  __device__ __forceinline__ void set(bool is_staggered) {
    beside = is_staggered ? kQuad : -kStagger;
    mask = is_staggered ? ~0u : 0u;
  }
  // Elements to the whole one from where a quad lies that is not staggered.
  __device__ __forceinline__ int whole() const { return -int(mask & kQuad); }

  // A move that decides by the mask.
  __device__ __forceinline__ uint32_t choose(uint32_t staggered, uint32_t other) const {
    uint32_t result;
    asm volatile("lop3.b32 %0, %1, %2, %3, 0xe4;"
                 : "=r"(result)
                 : "r"(staggered), "r"(other), "r"(mask));
    return result;
  }
};

template <int kBefore, int kAfter>
struct Run<4, kBefore, kAfter> {
  static constexpr bool kStaggers = staggers({kBefore, kAfter});
  static constexpr int kRegisters = kBefore + kAfter + 2;
  static constexpr int kColumns = kBefore + kQuad + kAfter;
  static_assert(kStaggers || kBefore <= 1);
  Stagger stagger;
  uint32_t values[kColumns];  // of what may be staggered the whole quad first

  __device__ __forceinline__ void load(uint32_t quad, int pitch, int half) {
    uint32_t const at = quad + half * pitch;
    constexpr int kFirst = kStaggers ? 0 : kBefore;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(values[kFirst]), "=r"(values[kFirst + 1]), "=r"(values[kFirst + 2]),
                   "=r"(values[kFirst + 3])
                 : "r"(at));
    if constexpr (kStaggers) {
      load_half(kQuad, at + stagger.beside * 4);
    } else if constexpr (kBefore == 1) {
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(values[0]) : "r"(at - 4));
    }
    if constexpr (kAfter == 2) {
      load_half(kBefore + kQuad, at + 16);
    } else if constexpr (kAfter == 1) {
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(values[kBefore + kQuad]) : "r"(at + 16));
    }
  }

  // In two parts, for 3xTF32. What the small part has beyond TF32's bits is not worth rounding.
  // It is made in the operands themselves, which takes no masks.
  __device__ __forceinline__ void split(uint32_t (&big)[kRegisters][4],
                                        uint32_t (&small)[kRegisters][4], int half) const {
    uint32_t all[kColumns], wide[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      all[c] = kStaggers ? moved(c) : values[c];
      wide[c] = __float_as_uint(device::big_tf32(__uint_as_float(all[c])));
    }
#pragma unroll
    for (int p = 0; p < kRegisters; ++p) {
      big[p][2 * half] = masked(wide[p]);
      big[p][2 * half + 1] = masked(wide[p + 2]);
    }
#pragma unroll
    for (int p = 0; p < kRegisters; ++p) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        asm volatile("sub.rn.f32 %0, %1, %2;"
                     : "=r"(small[p][2 * half + i])
                     : "r"(all[p + 2 * i]), "r"(wide[p + 2 * i]));
      }
    }
  }
  __device__ __forceinline__ void put(uint32_t (&operands)[kRegisters][4], int half) const {
#pragma unroll
    for (int p = 0; p < kRegisters; ++p) {
      operands[p][2 * half] = moved(p);
      operands[p][2 * half + 1] = moved(p + 2);
    }
  }

 private:
  __device__ __forceinline__ void load_half(int first, uint32_t at) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                 : "=r"(values[first]), "=r"(values[first + 1])
                 : "r"(at));
  }
  // The mask changes nothing, as the elements are rounded to TF32. But a move would be left out,
  // and loads would go to registers that products in flight still read; and the units that mask are
  // not those that multiply.
  __device__ __forceinline__ static uint32_t masked(uint32_t value) {
    uint32_t result;
    asm volatile("and.b32 %0, %1, 0xffffe000;" : "=r"(result) : "r"(value));
    return result;
  }
  // A column, counted from the first that the window reads, in a register of its own.
  __device__ __forceinline__ uint32_t moved(int column) const {
    if constexpr (kStaggers) {
      return stagger.choose(values[column], values[(column + kQuad) % kColumns]);
    } else {
      return masked(values[column]);
    }
  }
};

template <int kBefore, int kAfter>
struct Run<2, kBefore, kAfter> {
  static constexpr bool kStaggers = staggers({kBefore, kAfter});
  static constexpr int kRegisters = kBefore + kAfter + 2;
  static constexpr int kWordsBefore = (kBefore + 1) / 2;
  static constexpr int kWordsAfter = (kAfter + 1) / 2;
  static constexpr int kWords = kWordsBefore + 2 + kWordsAfter;
  Stagger stagger;
  // Two columns of a channel each; of what may be staggered the whole quad first.
  uint32_t words[2][kWords];

  __device__ __forceinline__ void load(uint32_t quad, int pitch, int half) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      uint32_t const at = quad + (half * 8 + c) * pitch;
      constexpr int kFirst = kStaggers ? 0 : kWordsBefore;
      asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                   : "=r"(words[c][kFirst]), "=r"(words[c][kFirst + 1])
                   : "r"(at));
      if constexpr (kStaggers) {
        asm volatile("ld.shared.b32 %0, [%1];"
                     : "=r"(words[c][kWords - 1])
                     : "r"(at + stagger.beside * 2));
      } else if constexpr (kWordsBefore > 0) {
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(words[c][0]) : "r"(at - 4));
      }
      if constexpr (kWordsAfter > 0) {
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(words[c][kWordsBefore + 2]) : "r"(at + 8));
      }
    }
  }

  __device__ __forceinline__ void put(uint32_t (&operands)[kRegisters][4], int half) const {
    uint32_t ordered[2][kWords];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        ordered[c][i] =
            kStaggers ? stagger.choose(words[c][i], words[c][(i + 2) % kWords]) : words[c][i];
      }
    }
#pragma unroll
    for (int p = 0; p < kRegisters; ++p) {
      operands[p][2 * half] = channels_of(ordered, p);
      operands[p][2 * half + 1] = channels_of(ordered, p + 2);
    }
  }

 private:
  // The two channels of a position, counted from the first that the window reads.
  __device__ __forceinline__ static uint32_t channels_of(uint32_t const (&ordered)[2][kWords],
                                                         int position) {
    int const column = position + 2 * kWordsBefore - kBefore;
    uint32_t result;
    if (column % 2 == 0) {
      asm volatile("prmt.b32 %0, %1, %2, 0x5410;"
                   : "=r"(result)
                   : "r"(ordered[0][column / 2]), "r"(ordered[1][column / 2]));
    } else {
      asm volatile("prmt.b32 %0, %1, %2, 0x7632;"
                   : "=r"(result)
                   : "r"(ordered[0][column / 2]), "r"(ordered[1][column / 2]));
    }
    return result;
  }
};

}  // namespace fusedconv::conv::sm90::runs
