// What a compiled kernel fixes: how products are formed, row groups of a block, how input is read.
#pragma once

#include "conv/mma_sync.hpp"
#include "conv/taps/schedule.hpp"

namespace fusedconv::conv::taps {

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
  static constexpr int kBlocks = kSplits ? 1 : 2;  // of a multiprocessor: totals take registers
  static constexpr int kParts = kWarps / kGroups;  // warps that share a row group
  static constexpr int kPositions = block_positions(kGroups);
  static_assert(kElementBytes == traits_of(kMath).element_bytes());
};

}  // namespace fusedconv::conv::taps
