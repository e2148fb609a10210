// What a compiled kernel fixes: how products are formed, and the columns of a block.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "conv/sm90/boxes/schedule.hpp"
#include "cute/arch/mma_sm90_gmma.hpp"
#include "cute/arch/mma_sm90_gmma_ext.hpp"

namespace fusedconv::conv::sm90::boxes {

namespace gmma = cute::SM90::GMMA;

inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kWarpgroupWarps = kWarpgroupThreads / 32;
inline constexpr int kWarpRows = kSlab / kWarpgroupWarps;
// Of a block whose consumers have a multiprocessor to themselves: these, and a warpgroup of which
// one thread copies and which gives registers away.
inline constexpr int kThreads = (kConsumers + 1) * kWarpgroupThreads;
inline constexpr int kConsumerRegisters = 232;
inline constexpr int kCopyRegisters = 40;
static_assert((kConsumers * kConsumerRegisters + kCopyRegisters) * kWarpgroupThreads <= 65536,
              "registers of a multiprocessor");

// Positions are the first operand and columns the second, or the other way: by channels in memory
// or, of 16 bits, by positions and by columns.
template <Math kMath, int kSecond, gmma::Major kFirstMajor, gmma::Major kSecondMajor>
struct Instruction;
#define FUSEDCONV_INSTRUCTION(second)                                                 \
  template <>                                                                         \
  struct Instruction<Math::kTf32, second, gmma::Major::K, gmma::Major::K> {           \
    using Element = float;                                                            \
    using Mma = gmma::MMA_64x##second##x8_F32TF32TF32_SS_TN<>;                        \
  };                                                                                  \
  template <gmma::Major kFirstMajor, gmma::Major kSecondMajor>                        \
  struct Instruction<Math::kF16, second, kFirstMajor, kSecondMajor> {                 \
    using Element = __half;                                                           \
    using Mma = gmma::MMA_64x##second##x16_F32F16F16_SS<kFirstMajor, kSecondMajor>;   \
  };                                                                                  \
  template <gmma::Major kFirstMajor, gmma::Major kSecondMajor>                        \
  struct Instruction<Math::kBF16, second, kFirstMajor, kSecondMajor> {                \
    using Element = __nv_bfloat16;                                                    \
    using Mma = gmma::MMA_64x##second##x16_F32BF16BF16_SS<kFirstMajor, kSecondMajor>; \
  };
FUSEDCONV_INSTRUCTION(256)
FUSEDCONV_INSTRUCTION(192)
FUSEDCONV_INSTRUCTION(128)
FUSEDCONV_INSTRUCTION(64)
FUSEDCONV_INSTRUCTION(48)
FUSEDCONV_INSTRUCTION(32)
FUSEDCONV_INSTRUCTION(16)
#undef FUSEDCONV_INSTRUCTION

// kFilterLines: the filter is lines of columns, one for each channel, else rows of channels.
template <Math kMath_, Shape kShape_, bool kFilterLines_>
struct Traits {
  static constexpr Math kMath = kMath_;
  static constexpr Shape kShape = kShape_;
  static constexpr bool kFilterLines = kFilterLines_;
  static constexpr int kColumns = kShape.columns;
  static constexpr int kSegments = kShape.segments;
  static constexpr bool kPlanes = kShape.planes;
  static constexpr int kResidents = kShape.residents;

  static constexpr int kOwnConsumers = kShape.consumers;
  static constexpr bool kStationary = kShape.stationary, kHalo = kShape.halo;
  static constexpr bool kFilterFirst = kShape.filter_first();
  static constexpr int kLines = kShape.positions / kHaloLine;  // of its boxes
  // Values of columns lie beside what a consumer stages.
  static constexpr bool kOwnValues = kShape.ping_pong && !kStationary;

  // Of a multiprocessor there are two consumers or four, whose registers are then scarce.
  static constexpr bool kScarce = kResidents * kOwnConsumers > kConsumers;
  // Where blocks share a multiprocessor one warp copies, and registers stay where they are.
  static constexpr bool kGivesRegisters = kResidents == 1;
  static constexpr int kBlockThreads =
      kOwnConsumers * kWarpgroupThreads + (kGivesRegisters ? kWarpgroupThreads : 32);
  static constexpr int kOwnRegisters = kOwnConsumers == 3 ? 160
                                       : kScarce          ? 112
                                                          : kConsumerRegisters;
  static constexpr int kLeftRegisters = kScarce ? 32 : kCopyRegisters;
  static_assert(!kGivesRegisters ||
                    (kOwnConsumers * kOwnRegisters + kLeftRegisters) * kWarpgroupThreads <=
                        65536 / kBlockThreads / 8 * 8 * kBlockThreads,
                "registers of a block");
  static constexpr int kProducers = kShape.producers();
  static constexpr int kSegmentColumns = kShape.segment_columns();
  // Of a step of channels: one a segment or group of those alike, or as many as one segment's
  // columns take.
  static constexpr int kAlike = kShape.alike;
  static constexpr int kInstructions =
      kSegments > 1 ? kSegments / kAlike : (kColumns + kMostBoxExtent - 1) / kMostBoxExtent;
  static constexpr int kInstructionColumns = kColumns / kInstructions;
  using Own = Instruction<kMath, kInstructionColumns, kPlanes ? gmma::Major::MN : gmma::Major::K,
                          kFilterLines ? gmma::Major::MN : gmma::Major::K>;
  using Element = typename Own::Element;
  using Mma = typename Own::Mma;

  static constexpr int kElementBytes = int(sizeof(Element));
  static constexpr int kChunk = kChunkBytes / kElementBytes;    // channels of a stage
  static constexpr int kSteps = kChunkBytes / kStepBytes;       // of a stage
  static constexpr int kSums = kInstructionColumns / 2;         // of a thread and an instruction
  static constexpr int kPortion = kChunkBytes / kElementBytes;  // columns that are staged at a time
  // The same channels first.
  static constexpr int kPlaneColumns = kShape.plane_columns(kPortion);
  static constexpr int kPlanePortions = kPlaneColumns / kPortion;
  static_assert(kColumns % kPlaneColumns == 0 && kPlaneColumns % kPortion == 0, "whole portions");
  static_assert(kPlanePortions <= kShape.staged_portions() || kSegments == 1);
  static_assert(!kShape.ping_pong || (kResidents == 1 && kSegments == 1), "turns of whole blocks");
  static_assert(!kHalo || kFilterFirst || (!kPlanes && !kStationary && !kShape.ping_pong),
                "two slabs of channels");
  static_assert(!kFilterFirst || (kHalo && kStationary && !kPlanes && kSegments == 1 &&
                                  kElementBytes == 2 && kColumns == kSlab),
                "positions of a box by all columns of a block");
  static_assert(!kStationary || (kShape.ping_pong && kInstructions == 1), "one step after another");
  static_assert(kElementBytes == traits_of(kMath).element_bytes());
};

}  // namespace fusedconv::conv::sm90::boxes
