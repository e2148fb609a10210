// What a compiled kernel fixes: how products are formed, row groups of a block, how input is read.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "conv/taps/schedule.hpp"
#include "cuda/math.hpp"
#include "cute/arch/mma_sm80.hpp"

namespace fusedconv::conv::taps {

// Fragments of a 16-byte chunk of channels have the same registers for elements of 2 and 4 bytes:
// what differs is the instruction.
template <Math kMath>
struct Instruction;
template <>
struct Instruction<Math::kTf32> {
  using Element = float;
  using Mma = cute::SM80_16x8x8_F32TF32TF32F32_TN;
};
template <>
struct Instruction<Math::kTf32x3> : Instruction<Math::kTf32> {};
template <>
struct Instruction<Math::kF16> {
  using Element = __half;
  using Mma = cute::SM80_16x8x16_F32F16F16F32_TN;
};
template <>
struct Instruction<Math::kBF16> {
  using Element = __nv_bfloat16;
  using Mma = cute::SM80_16x8x16_F32BF16BF16F32_TN;
};

template <Math kMath_, int kGroups_, Loads kLoads_>
struct Traits {
  static constexpr Math kMath = kMath_;
  static constexpr int kGroups = kGroups_;
  static constexpr Loads kLoads = kLoads_;

  using Element = typename Instruction<kMath>::Element;
  using Mma = typename Instruction<kMath>::Mma;

  static constexpr int kElementBytes = int(sizeof(Element));
  static constexpr int kVector = 16 / kElementBytes;
  static constexpr int kChunk = kChunkBytes / kElementBytes;  // channels
  static constexpr bool kRounds = kMath == Math::kTf32;       // operands, to TF32
  static constexpr bool kSplits = kMath == Math::kTf32x3;
  // Each step of a split product is a sum of its own, which float32 additions join: what the tensor
  // cores drop of long sums would exceed the error of eager's. That takes twice the registers.
  static constexpr int kBlocks = kSplits ? 1 : 2;  // of a multiprocessor
  static constexpr int kParts = kWarps / kGroups;  // warps that share a row group
  static constexpr int kPositions = block_positions(kGroups);
  static_assert(kElementBytes == traits_of(kMath).element_bytes());
};

}  // namespace fusedconv::conv::taps
