// What a compiled kernel fixes: its operands' type, instructions and registers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "conv/sm90/boxes/traits.hpp"
#include "conv/sm90/phases/schedule.hpp"

namespace fusedconv::conv::sm90::phases {

namespace gmma = cute::SM90::GMMA;

inline constexpr int kWarpgroup = 128;

template <Math kMath, Shape kShape_>
struct Traits {
  static constexpr Shape kShape = kShape_;
  static constexpr int kChannels = kShape.channels, kPlanes = kShape.planes();
  static constexpr int kSums = kShape.plane_columns() / 2;  // of a thread
  static constexpr int kPhaseSums = kChannels / 2;
  static constexpr int kEights = kChannels / 8;  // of a phase's columns
  // Rows of channels are both operands.
  using Own = boxes::Instruction<kMath, kChannels, gmma::Major::K, gmma::Major::K>;
  using Element = typename Own::Element;
  using Mma = typename Own::Mma;

  static constexpr int kConsumers = kShape.consumers();
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
  // Registers of a thread that multiplies, and of one that copies.
  static constexpr int kRegisters = kConsumers == 3 ? 160 : 240, kCopyRegisters = 24;
  static_assert((kConsumers * kRegisters + kCopyRegisters) * kWarpgroup <= 65536);
  static_assert(kChannels % 16 == 0 && kSums <= kRegisters * 2 / 3, "sums fit registers");
};

}  // namespace fusedconv::conv::sm90::phases
