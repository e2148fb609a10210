// What a compiled kernel fixes, as its one template parameter.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "conv/sm90/wgrad/schedule.hpp"
#include "cute/arch/mma_sm90_gmma.hpp"

namespace fusedconv::conv::sm90::wgrad {

namespace gmma = cute::SM90::GMMA;

inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kWarpgroupWarps = kWarpgroupThreads / 32;
inline constexpr int kSplitterWarps = kWarpgroupWarps - 1;  // beside the producer's
inline constexpr int kSplitterThreads = kSplitterWarps * 32;
inline constexpr int kMostThreads = (kMaxWarpgroups + 1) * kWarpgroupThreads;
inline constexpr int kConsumerRegisters = 160;
inline constexpr int kProducerRegisters = 32;
static_assert((kMaxWarpgroups * kConsumerRegisters + kProducerRegisters) * kWarpgroupThreads <=
                  65536,
              "registers of a multiprocessor");

// The output's gradient is from registers, its rows are output channels; the input's lines of all
// filter rows, each kBlock channels, are in shared memory. Both have positions as K.
template <Math kMath, int kFilterRows>
struct Instruction;
#define FUSEDCONV_WGRAD_INSTRUCTION(ROWS, N)                                          \
  template <>                                                                         \
  struct Instruction<Math::kTf32, ROWS> {                                             \
    using Element = float;                                                            \
    using Mma = gmma::MMA_64x##N##x8_F32TF32TF32_RS_TN<>;                             \
  };                                                                                  \
  template <>                                                                         \
  struct Instruction<Math::kF16, ROWS> {                                              \
    using Element = __half;                                                           \
    using Mma = gmma::MMA_64x##N##x16_F32F16F16_RS<gmma::Major::K, gmma::Major::K>;   \
  };                                                                                  \
  template <>                                                                         \
  struct Instruction<Math::kBF16, ROWS> {                                             \
    using Element = __nv_bfloat16;                                                    \
    using Mma = gmma::MMA_64x##N##x16_F32BF16BF16_RS<gmma::Major::K, gmma::Major::K>; \
  };
FUSEDCONV_WGRAD_INSTRUCTION(1, 64)
FUSEDCONV_WGRAD_INSTRUCTION(2, 128)
FUSEDCONV_WGRAD_INSTRUCTION(3, 192)
#undef FUSEDCONV_WGRAD_INSTRUCTION
// Strict fp32 takes the lines one by one: a line's sum is small beside its total, which the other
// registers hold.
template <int kFilterRows>
struct Instruction<Math::kTf32x3, kFilterRows> {
  using Element = float;
  using Mma = gmma::MMA_64x64x8_F32TF32TF32_RS_TN<>;
};

template <Math kMath_, int kFilterRows_, int kHalves_>
struct Traits {
  static constexpr Math kMath = kMath_;
  static constexpr int kFilterRows = kFilterRows_;
  static_assert(kFilterRows <= kMaxFilterRows);
  static constexpr int kHalves = kHalves_;  // of a strip
  static constexpr bool kSplits = traits_of(kMath).parts == 2;
  static constexpr int kStripBytes = kHalves * kHalfStripBytes;
  static constexpr int kInputBytes = kBlock * kStripBytes;  // of a line, in each of its parts
  // Steps of a turn of the consumers' loop, in which the two sets of operands alternate.
  static constexpr int kTurn = kHalves == 1 && !kSplits ? 2 : 1;

  using Element = typename Instruction<kMath, kFilterRows>::Element;
  using Mma = typename Instruction<kMath, kFilterRows>::Mma;

  static constexpr int kElementBytes = int(sizeof(Element));
  static constexpr int kStrip = kStripBytes / kElementBytes;  // columns
  // Of a thread: four for every eight input channels of each filter row.
  static constexpr int kRowAccumulators = kBlock / 2;
  static constexpr int kAccumulators = kFilterRows * kRowAccumulators;
  static_assert(kElementBytes == traits_of(kMath).element_bytes());
};

}  // namespace fusedconv::conv::sm90::wgrad
