// What a compiled kernel fixes, as its one template parameter.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "conv/sm90/strips/schedule.hpp"
#include "cute/arch/mma_sm90_gmma.hpp"

namespace fusedconv::conv::sm90::strips {

namespace gmma = cute::SM90::GMMA;

// The filter from registers, lines as they lie.
template <Math kMath, int kPositions>
struct Instruction;
template <>
struct Instruction<Math::kF16, 64> {
  using Element = __half;
  using Mma = gmma::MMA_64x64x16_F32F16F16_RS<gmma::Major::K, gmma::Major::MN>;
};
template <>
struct Instruction<Math::kF16, 128> {
  using Element = __half;
  using Mma = gmma::MMA_64x128x16_F32F16F16_RS<gmma::Major::K, gmma::Major::MN>;
};
template <>
struct Instruction<Math::kBF16, 64> {
  using Element = __nv_bfloat16;
  using Mma = gmma::MMA_64x64x16_F32BF16BF16_RS<gmma::Major::K, gmma::Major::MN>;
};
template <>
struct Instruction<Math::kBF16, 128> {
  using Element = __nv_bfloat16;
  using Mma = gmma::MMA_64x128x16_F32BF16BF16_RS<gmma::Major::K, gmma::Major::MN>;
};

inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kWarpgroupWarps = kWarpgroupThreads / 32;
inline constexpr int kCopyWarps = kWarpgroupWarps - 1;  // beside the one that brings lines

template <Math kMath_, Shape kShape_>
struct Traits {
  static constexpr Math kMath = kMath_;
  static constexpr Shape kShape = kShape_;
  using Element = typename Instruction<kMath, kShape.positions>::Element;
  using Mma = typename Instruction<kMath, kShape.positions>::Mma;

  static constexpr int kSums = kChannels * kShape.positions / kWarpgroupThreads;  // of a thread
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroupThreads;
  // A filter takes 144 of them.
  static constexpr int kConsumerRegisters = kShape.positions > 64 ? 240 : 216;
  static constexpr int kCopyRegisters = kShape.positions > 64 ? 24 : 72;
  static_assert((kConsumers * kConsumerRegisters + kCopyRegisters) * kWarpgroupThreads <=
                    kThreads * 168,
                "registers of a block as it is launched");
};

}  // namespace fusedconv::conv::sm90::strips
