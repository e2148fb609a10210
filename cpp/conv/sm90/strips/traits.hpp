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
template <Math kMath>
struct Instruction;
template <>
struct Instruction<Math::kF16> {
  using Element = __half;
  using Mma = gmma::MMA_64x64x16_F32F16F16_RS<gmma::Major::K, gmma::Major::MN>;
};
template <>
struct Instruction<Math::kBF16> {
  using Element = __nv_bfloat16;
  using Mma = gmma::MMA_64x64x16_F32BF16BF16_RS<gmma::Major::K, gmma::Major::MN>;
};

inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kWarpgroupWarps = kWarpgroupThreads / 32;
inline constexpr int kCopyWarps = kWarpgroupWarps - 1;  // beside the one that brings lines
inline constexpr int kThreads = (kConsumers + 1) * kWarpgroupThreads;
inline constexpr int kSums = kChannels * kPositions / kWarpgroupThreads;  // of a thread
// A filter takes 144 of them.
inline constexpr int kConsumerRegisters = 216, kCopyRegisters = 72;
static_assert((kConsumers * kConsumerRegisters + kCopyRegisters) * kWarpgroupThreads <=
                  kThreads * 168,
              "registers of a block as it is launched");

template <Math kMath_, Reach kReach_>
struct Traits {
  static constexpr Math kMath = kMath_;
  static constexpr Reach kReach = kReach_;
  using Element = typename Instruction<kMath>::Element;
  using Mma = typename Instruction<kMath>::Mma;
};

}  // namespace fusedconv::conv::sm90::strips
