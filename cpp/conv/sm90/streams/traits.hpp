// What a compiled kernel fixes, as its one template parameter.
#pragma once

#include "conv/sm90/streams/schedule.hpp"
#include "cute/arch/mma_sm90_gmma.hpp"
#include "cute/arch/mma_sm90_gmma_ext.hpp"

namespace fusedconv::conv::sm90::streams {

namespace gmma = cute::SM90::GMMA;

inline constexpr int kWarpgroup = 128;
inline constexpr int kWarps = kWarpgroup / 32;

// Positions are the first operand, from registers.
template <Math kMath, int kColumns>
struct Instruction;
template <>
struct Instruction<Math::kTf32, 128> {
  using Mma = gmma::MMA_64x128x8_F32TF32TF32_RS_TN<>;
};
template <>
struct Instruction<Math::kTf32, 192> {
  using Mma = gmma::MMA_64x192x8_F32TF32TF32_RS_TN<>;
};
template <>
struct Instruction<Math::kTf32, 256> {
  using Mma = gmma::MMA_64x256x8_F32TF32TF32_RS_TN<>;
};

template <Math kMath, Shape kShape_>
struct Traits {
  static constexpr Shape kShape = kShape_;
  static constexpr int kSums = kShape.columns / 2;  // of a thread
  using Mma = typename Instruction<kMath, kShape.columns>::Mma;

  // Eights of columns whose results registers hold beside the next tile's sums: the last.
  static constexpr int kEights = kShape.columns / 8;
  static constexpr int kDeferred = kShape.columns <= 192 ? kEights : 12;

  static constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
  // Registers of a thread that multiplies, and of one that copies.
  static constexpr int kRegisters = 240, kCopyRegisters = 24;
  static_assert((kConsumers * kRegisters + kCopyRegisters) * kWarpgroup <= 65536);
};

}  // namespace fusedconv::conv::sm90::streams
