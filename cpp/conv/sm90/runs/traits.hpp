// What a compiled kernel fixes, as its one template parameter.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "conv/sm90/runs/schedule.hpp"
#include "cute/arch/mma_sm90_gmma.hpp"

namespace fusedconv::conv::sm90::runs {

namespace gmma = cute::SM90::GMMA;

inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kWarpgroupWarps = kWarpgroupThreads / 32;

// Positions are the instruction's rows, from registers; the filter is in shared memory.
template <Math kMath>
struct Instruction;
template <>
struct Instruction<Math::kTf32> {
  using Element = float;
  using Mma = gmma::MMA_64x64x8_F32TF32TF32_RS_TN<>;
  using HalfMma = gmma::MMA_64x32x8_F32TF32TF32_RS_TN<>;  // of half of the columns
};
template <>
struct Instruction<Math::kTf32x3> : Instruction<Math::kTf32> {};
template <>
struct Instruction<Math::kF16> {
  using Element = __half;
  using Mma = gmma::MMA_64x64x16_F32F16F16_RS<gmma::Major::K, gmma::Major::K>;
  using HalfMma = gmma::MMA_64x32x16_F32F16F16_RS<gmma::Major::K, gmma::Major::K>;
};
template <>
struct Instruction<Math::kBF16> {
  using Element = __nv_bfloat16;
  using Mma = gmma::MMA_64x64x16_F32BF16BF16_RS<gmma::Major::K, gmma::Major::K>;
  using HalfMma = gmma::MMA_64x32x16_F32BF16BF16_RS<gmma::Major::K, gmma::Major::K>;
};

inline constexpr int kAccumulators = 64 * kBlockN / kWarpgroupThreads;  // of an instruction
// Instructions that cover a tile: of four neighbouring positions the first takes the even ones.
inline constexpr int kRowTiles = 2;
static_assert(kRowTiles * 64 == kTileQuads * kQuad, "a warpgroup's tile");

template <Math kMath_, int kBefore, int kAfter, bool kInterleaves_, class Form_>
struct Traits {
  static constexpr Math kMath = kMath_;
  static constexpr Window kWindow{kBefore, kAfter};
  static constexpr bool kInterleaves = kInterleaves_;  // sub-pixel phases in the output
  static constexpr bool kOwnTaps = kInterleaves && kWindow.size() > 1;  // by phase
  static constexpr bool kStaggers = !kInterleaves && staggers(kWindow);
  using Form = Form_;  // the activation

  using Element = typename Instruction<kMath>::Element;
  using Mma = typename Instruction<kMath>::Mma;
  using HalfMma = typename Instruction<kMath>::HalfMma;

  static constexpr int kElementBytes = int(sizeof(Element));
  static constexpr int kKBlock = kKBlockBytes / kElementBytes;  // channels
  static constexpr bool kSplits =
      traits_of(kMath).parts == 2;  // operands in a big and a small part

  static constexpr int kConsumers = consumers_of(kMath);
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroupThreads;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 224 : 152;
  static constexpr int kProducerRegisters = 56;
  static_assert((kConsumers * kConsumerRegisters + kProducerRegisters) * kWarpgroupThreads <= 65536,
                "registers of a multiprocessor");
  static_assert(kElementBytes == traits_of(kMath).element_bytes());
};

}  // namespace fusedconv::conv::sm90::runs
