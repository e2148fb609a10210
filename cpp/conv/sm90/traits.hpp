// What a compiled kernel fixes, as its one template parameter.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "conv/sm90/schedule.hpp"
#include "cute/arch/mma_sm90_gmma.hpp"

namespace fusedconv::conv::sm90 {

namespace gmma = cute::SM90::GMMA;

inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kWarpgroupWarps = kWarpgroupThreads / 32;
// With one more warp a thread could not have the 154 registers that an instruction of 64 x 256
// needs.
inline constexpr int kThreads = (1 + kConsumers) * kWarpgroupThreads;

inline constexpr int kConsumerRegisters = 200;
inline constexpr int kProducerRegisters = 104;
static_assert((kConsumers * kConsumerRegisters + kProducerRegisters) * kWarpgroupThreads <= 65536,
              "registers of a multiprocessor");

template <Math kMath>
struct Instruction;
template <>
struct Instruction<Math::kTf32> {
  using Element = float;
  using Mma = gmma::MMA_64x256x8_F32TF32TF32_SS_TN<>;
};
template <>
struct Instruction<Math::kTf32x3> {
  using Element = float;
  using Mma = gmma::MMA_64x128x8_F32TF32TF32_SS_TN<>;
};
template <>
struct Instruction<Math::kF16> {
  using Element = __half;
  using Mma = gmma::MMA_64x256x16_F32F16F16_SS<gmma::Major::K, gmma::Major::K>;
};
template <>
struct Instruction<Math::kBF16> {
  using Element = __nv_bfloat16;
  using Mma = gmma::MMA_64x256x16_F32BF16BF16_SS<gmma::Major::K, gmma::Major::K>;
};

template <Math kMath_, Sharing kSharing_, Layout kLayout_>
struct Traits {
  static constexpr Math kMath = kMath_;
  static constexpr Sharing kSharing = kSharing_;
  static constexpr Layout kLayout = kLayout_;  // of the input
  static constexpr TileShape kTile{kMath, kSharing};

  using Element = typename Instruction<kMath>::Element;
  using Mma = typename Instruction<kMath>::Mma;

  static constexpr int kElementBytes = kTile.element_bytes();
  static constexpr int kBlockN = kTile.block_n();
  static constexpr int kTileN = kTile.n();
  static constexpr int kKBlock = kTile.k();                   // channels
  static constexpr bool kKeepsFilter = kTile.keeps_filter();  // else it passes through the stages
  static constexpr bool kSplits = kTile.parts() == 2;         // operands in a big and a small part
  static constexpr int kAccumulators = kBlockM * kBlockN / kWarpgroupThreads;  // of a thread

  static_assert(sizeof(Element) == kElementBytes);
  static_assert(kKBlock * kElementBytes == kKBlockBytes, "an instruction takes a k-block");
};

}  // namespace fusedconv::conv::sm90
