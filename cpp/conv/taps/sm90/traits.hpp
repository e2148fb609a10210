// What a compiled kernel fixes: how products are formed, and a consumer's tile.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "conv/taps/sm90/schedule.hpp"
#include "cute/arch/mma_sm90_gmma.hpp"

namespace fusedconv::conv::taps::sm90 {

namespace gmma = cute::SM90::GMMA;

inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kWarpgroupWarps = kWarpgroupThreads / 32;
inline constexpr int kLoadThreads = kLoadWarps * 32;
// Consumers, loading warps, and one that copies the filter.
inline constexpr int kThreads = kConsumers * kWarpgroupThreads + kLoadThreads + 32;
inline constexpr int kConsumerRegisters = 184;
inline constexpr int kLoadRegisters = 72;
static_assert(kThreads % kWarpgroupThreads == 0, "which change their registers together");
static_assert(kConsumers * kWarpgroupThreads * kConsumerRegisters +
                      (kThreads - kConsumers * kWarpgroupThreads) * kLoadRegisters <=
                  65536,
              "registers of a multiprocessor");

// Both operands from shared memory, channels innermost. ptxas refuses instructions whose sums take
// all registers that a thread has when it is launched: so 128 columns at most.
template <Math kMath, int kColumns>
struct Instruction;
#define FUSEDCONV_INSTRUCTION(math, columns, element, name, ...) \
  template <>                                                    \
  struct Instruction<Math::math, columns> {                      \
    using Element = element;                                     \
    using Mma = gmma::MMA_64x##columns##name<__VA_ARGS__>;       \
  };
FUSEDCONV_INSTRUCTION(kTf32, 128, float, x8_F32TF32TF32_SS_TN)
FUSEDCONV_INSTRUCTION(kTf32, 64, float, x8_F32TF32TF32_SS_TN)
FUSEDCONV_INSTRUCTION(kTf32x3, 128, float, x8_F32TF32TF32_SS_TN)
FUSEDCONV_INSTRUCTION(kTf32x3, 64, float, x8_F32TF32TF32_SS_TN)
FUSEDCONV_INSTRUCTION(kF16, 128, __half, x16_F32F16F16_SS, gmma::Major::K, gmma::Major::K)
FUSEDCONV_INSTRUCTION(kF16, 64, __half, x16_F32F16F16_SS, gmma::Major::K, gmma::Major::K)
FUSEDCONV_INSTRUCTION(kBF16, 128, __nv_bfloat16, x16_F32BF16BF16_SS, gmma::Major::K, gmma::Major::K)
FUSEDCONV_INSTRUCTION(kBF16, 64, __nv_bfloat16, x16_F32BF16BF16_SS, gmma::Major::K, gmma::Major::K)
#undef FUSEDCONV_INSTRUCTION

template <Math kMath_, int kRowGroups_, int kColumns_>
struct Traits {
  static constexpr Math kMath = kMath_;
  static constexpr int kRowGroups = kRowGroups_;
  static constexpr int kColumns = kColumns_;

  static constexpr Shape kShape{.row_groups = kRowGroups, .columns = kColumns};
  static constexpr int kMmaColumns = kShape.mma_columns();
  static constexpr bool kSplitsChannels = kShape.splits_channels();
  static constexpr int kMmas = kColumns / kMmaColumns;  // beside each other
  using Element = typename Instruction<kMath, kMmaColumns>::Element;
  using Mma = typename Instruction<kMath, kMmaColumns>::Mma;

  static constexpr int kElementBytes = int(sizeof(Element));
  static constexpr int kVector = 16 / kElementBytes;
  static constexpr bool kRounds = kMath == Math::kTf32;  // operands, to TF32
  // In a big and a small part. Each tap of a chunk is a sum of its own, which float32 additions
  // join: what the tensor cores drop of long sums would exceed the error of eager's.
  static constexpr bool kSplits = kMath == Math::kTf32x3;
  static constexpr int kSums = kMmaColumns / 2;  // of a thread and an instruction
  static_assert(kElementBytes == traits_of(kMath).element_bytes());
};

}  // namespace fusedconv::conv::taps::sm90
