// The weight gradient: two consumer warpgroups multiply what one thread has copied, slab after
// slab.
#pragma once

#include <cstdint>
#include <type_traits>

#include "conv/sm90/boxes/operand.hpp"
#include "conv/sm90/boxes/traits.hpp"
#include "conv/sm90/boxes/weight/barriers.hpp"
#include "conv/sm90/boxes/weight/bias_sums.hpp"
#include "conv/sm90/boxes/weight/params.hpp"
#include "conv/sm90/boxes/weight/store_weight.hpp"
#include "conv/sm90/boxes/weight/transpose.hpp"
#include "conv/sm90/partial_sums.hpp"
#include "conv/sm90/wait.hpp"
#include "conv/sm90/wgmma.hpp"
#include "cuda/async.hpp"
#include "cute/arch/config.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cutlass/arch/reg_reconfig.h"

#if defined(__CUDA_ARCH__) && !defined(CUTE_ARCH_MMA_SM90A_ENABLED)
#error "compile the Hopper family for compute capability 9.0a alone"
#endif

namespace fusedconv::conv::sm90::boxes::weight {

// In 16 bits both operands have channels beside each other in memory, and positions as K; in TF32
// the first comes from registers, and the second has positions beside each other.
template <Math kMath, int kColumns>
struct Instruction;
#define FUSEDCONV_INSTRUCTION(columns)                                                        \
  template <>                                                                                 \
  struct Instruction<Math::kTf32, columns> {                                                  \
    using Element = float;                                                                    \
    using Mma = gmma::MMA_64x##columns##x8_F32TF32TF32_RS_TN<>;                               \
  };                                                                                          \
  template <>                                                                                 \
  struct Instruction<Math::kF16, columns> {                                                   \
    using Element = __half;                                                                   \
    using Mma = gmma::MMA_64x##columns##x16_F32F16F16_SS<gmma::Major::MN, gmma::Major::MN>;   \
  };                                                                                          \
  template <>                                                                                 \
  struct Instruction<Math::kBF16, columns> {                                                  \
    using Element = __nv_bfloat16;                                                            \
    using Mma = gmma::MMA_64x##columns##x16_F32BF16BF16_SS<gmma::Major::MN, gmma::Major::MN>; \
  };
FUSEDCONV_INSTRUCTION(256)
FUSEDCONV_INSTRUCTION(192)
FUSEDCONV_INSTRUCTION(128)
FUSEDCONV_INSTRUCTION(64)
#undef FUSEDCONV_INSTRUCTION

template <Math kMath_, int kChannels, int kUnits, bool kTransposes, bool kSumsBias_ = false>
struct Traits {
  static constexpr Math kMath = kMath_;
  static constexpr bool kFromRegisters = kMath == Math::kTf32;
  static constexpr Block kBlock{.channels = kChannels,
                                .units = kUnits,
                                .from_registers = kFromRegisters,
                                .transposes = kTransposes};
  static_assert(kFromRegisters || !kTransposes);
  static constexpr bool kSumsBias = kSumsBias_;
  static_assert(kBlock.sums_bias() || !kSumsBias);
  // Consumers divide the input channels, or else the units.
  static constexpr bool kDividesChannels = !kFromRegisters && kChannels == kConsumers;
  static constexpr int kOwnUnits = kDividesChannels ? kUnits : kUnits / kConsumers;
  static_assert(kDividesChannels || kUnits % kConsumers == 0);
  static_assert(kDividesChannels || kFromRegisters || kChannels == 1);
  static constexpr int kColumns = (kFromRegisters ? kChannels : kOwnUnits) * kUnit;
  using Mma = typename Instruction<kMath, kColumns>::Mma;
  using Element = typename Instruction<kMath, kColumns>::Element;

  static constexpr int kInstructionSums = kColumns / 2;  // of a thread
  static constexpr int kInstructions = kFromRegisters ? kOwnUnits : 1;
  static constexpr int kSums = kInstructionSums * kInstructions;
  static constexpr int kSteps = kBlock.additions();
  static constexpr int kStepPositions = kBlock.positions() / kSteps;  // of an instruction
  static constexpr int kStageBytes = Memory::stage_bytes(kBlock);
  // What transposes holds a box in registers.
  static constexpr int kRegistersMoved = kTransposes ? 8 : 0;
  static constexpr int kOwnRegisters = kConsumerRegisters - kRegistersMoved;
  static constexpr int kOtherRegisters = kCopyRegisters + kConsumers * kRegistersMoved;
};

template <class Traits>
__device__ __forceinline__ void fill_ring(Params const& p, Maps const& maps, Barriers& barriers,
                                          unsigned char* shared) {
  constexpr auto kHint = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  constexpr Block kBlock = Traits::kBlock;
  constexpr int kBoxes = kBlock.unit_boxes();
  BlockWork const work(p);
  Task const task(p, work.task);
  int const first_channel = task.channel_block * kBlock.channels;
  int const first_unit = task.unit_block * kBlock.units;
  int const units = min(kBlock.units, p.units - first_unit);
  int const input_bytes = kBlock.packs()
                              ? min(kBlock.channels, p.all_channels - first_channel) * kTileBytes
                              : kBlock.channels * kBoxes * p.box_bytes;
  int const bytes = units * kBoxes * p.box_bytes + input_bytes;
  device::RingCursor cursor;
  cursor.parity = 1;
  int const last = work.last(p);
  for (int slab = work.first(p); slab < last; ++slab) {
    Origin const at(p, slab);
    uint64_t* const full = &barriers.full[cursor.stage];
    unsigned char* tile = shared + cursor.stage * Traits::kStageBytes;
    wait_for(&barriers.empty[cursor.stage], cursor.parity);
    device::arrive_and_expect(full, bytes);
    if constexpr (kBlock.packs()) {
      device::bulk_load(device::shared_address(tile),
                        p.packed + (int64_t(slab) * p.all_channels + first_channel) * kTileBytes,
                        input_bytes, full);
      tile += kBlock.channels * kTileBytes;
    } else {
#pragma unroll
      for (int i = 0; i < kBlock.channels * kBoxes; ++i, tile += kTileBytes / kBoxes) {
        cute::SM90_TMA_LOAD_5D::copy(&maps.input, full, kHint, tile,
                                     first_channel * kUnit + i * (kUnit / kBoxes), at.w, at.h, at.d,
                                     at.sample);
      }
    }
#pragma unroll 1
    for (int i = 0; i < units; ++i) {
      Unit const unit(p, first_unit + i);
      Tap const shift = p.taps[unit.tap];
      CUtensorMap const* const source = &maps.sources[p.tap_sources[unit.tap]];
#pragma unroll
      for (int box = 0; box < kBoxes; ++box, tile += kTileBytes / kBoxes) {
        cute::SM90_TMA_LOAD_5D::copy(source, full, kHint, tile, unit.channel + box * kUnit / kBoxes,
                                     at.w + shift[2], at.h + shift[1], at.d + shift[0], at.sample);
      }
    }
    cursor.advance(p.stages);
  }
}

// This thread's words of a unit in TF32: of a box of 32 channels its rows, swizzled by position.
struct UnitRow {
  uint32_t at;
  int behind;  // from a position to that 4 behind it

  __device__ __forceinline__ UnitRow(uint32_t unit, int thread) {
    int const quad = thread % 32 / 4, position = thread % 4;
    int const piece = (thread / 32 + 4 * (quad >> 2)) ^ position;
    at = unit + position * kChunkBytes + piece * kPieceBytes + (quad & 3) * 4;
    behind = 4 * kChunkBytes + ((piece ^ 4) - piece) * kPieceBytes;
  }
  // Of an instruction: two rows by two positions.
  __device__ __forceinline__ void load(uint32_t offset, uint32_t (&words)[4]) const {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      words[e] =
          device::load_word(at + offset + e % 2 * (kTileBytes / 2) + (e / 2 == 0 ? 0 : behind));
    }
  }
};

template <class Traits>
__device__ __forceinline__ void consume(Params const& p, Barriers& barriers, unsigned char* shared,
                                        int consumer, int thread) {
  using Indices = std::make_integer_sequence<int, Traits::kInstructionSums>;
  constexpr Block kBlock = Traits::kBlock;
  constexpr int kRows = 8 * kChunkBytes;  // eight, after which a swizzle repeats
  constexpr int kInstructions = Traits::kInstructions, kSums = Traits::kInstructionSums;
  bool const signals = thread % 32 == 0;
  uint32_t const ring = device::shared_address(shared);
  uint32_t const units = ring + kBlock.channels * kTileBytes +
                         (Traits::kDividesChannels ? 0 : consumer * Traits::kOwnUnits * kTileBytes);
  uint64_t const channels0 = operand(ring + (Traits::kDividesChannels ? consumer * kTileBytes : 0),
                                     gmma::LayoutType::B128, kTileBytes, kRows);
  [[maybe_unused]] uint64_t const units0 =
      operand(units, gmma::LayoutType::B128, kTileBytes, kRows);
  [[maybe_unused]] UnitRow const row(units, thread);
  BlockWork const work(p);
  Task const task(p, work.task);
  int const first_unit = task.unit_block * kBlock.units;
  using Bias = std::conditional_t<Traits::kFromRegisters, BiasOfWords<Traits>, BiasOfTiles<Traits>>;
  [[maybe_unused]] auto bias = Bias::of(consumer, thread);
  int left = work.last(p) - work.first(p);
  float sums[kInstructions][kSums];
#pragma unroll
  for (int u = 0; u < kInstructions; ++u) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[u][i] = 0.0f;
  }
  auto* const partials =
      reinterpret_cast<float4*>(p.partials + partial_index(p, work.task, work.split, kBlock) +
                                consumer * Traits::kSums * kWarpgroupThreads) +
      thread;
  device::RingCursor cursor;
  bool first = true;
  while (left > 0) {
    int const count = min(left, kFlushAdditions / Traits::kSteps);
    left -= count;
    [[maybe_unused]] int in_flight = -1;  // the stage that products in flight read
#pragma unroll 1
    for (int step = 0; step < count; ++step) {
      uint32_t const offset = uint32_t(cursor.stage * Traits::kStageBytes);
      uint64_t const channels = channels0 + (offset >> 4);
      wait_for(&barriers.full[cursor.stage], cursor.parity);
      if constexpr (Traits::kFromRegisters) {
        uint32_t words[kInstructions][Traits::kSteps][4];
#pragma unroll
        for (int u = 0; u < kInstructions; ++u) {
#pragma unroll
          for (int i = 0; i < Traits::kSteps; ++i) {
            row.load(offset + u * kTileBytes + i * kRows, words[u][i]);
          }
        }
        if constexpr (Traits::kSumsBias) {
#pragma unroll
          for (int u = 0; u < kInstructions; ++u) bias.add_and_round(u, words[u]);
        }
        if constexpr (kBlock.transposes) {
          wait_for(&barriers.transposed[cursor.stage], cursor.parity);
        }
        cute::warpgroup_arrive();
#pragma unroll
        for (int u = 0; u < kInstructions; ++u) {
#pragma unroll
          for (int i = 0; i < Traits::kSteps; ++i) {
            sm90::multiply<typename Traits::Mma>(words[u][i],
                                                 channels + (i * Traits::kStepPositions * 4 >> 4),
                                                 sums[u], gmma::ScaleOut::One, Indices{});
          }
        }
        cute::warpgroup_commit_batch();
        // Registers are loaded anew when products are done; meanwhile the other consumer
        // multiplies.
        cute::warpgroup_wait<0>();
        if (signals) device::arrive(&barriers.empty[cursor.stage]);
      } else {
        constexpr uint32_t kStepUnits = Traits::kStepPositions * kChunkBytes >> 4;
        uint64_t const columns = units0 + (offset >> 4);
        cute::warpgroup_arrive();
#pragma unroll
        for (int i = 0; i < Traits::kSteps; ++i) {
          multiply<typename Traits::Mma>(channels + i * kStepUnits, columns + i * kStepUnits,
                                         sums[0], Indices{});
        }
        cute::warpgroup_commit_batch();
        if constexpr (Traits::kSumsBias) {
          bias.add(shared + offset + kBlock.channels * kTileBytes);
        }
        cute::warpgroup_wait<1>();
        if (in_flight >= 0 && signals) device::arrive(&barriers.empty[in_flight]);
        in_flight = cursor.stage;
      }
      cursor.advance(p.stages);
    }
    cute::warpgroup_wait<0>();
    if constexpr (!Traits::kFromRegisters) {
      if (signals) device::arrive(&barriers.empty[in_flight]);
    }
#pragma unroll
    for (int u = 0; u < kInstructions; ++u) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) cute::warpgroup_fence_operand(sums[u][i]);
    }
    if (p.grad_weight != nullptr) {  // after all slabs
      store_weight<Traits>(p, task, consumer, thread, sums);
      break;
    }
#pragma unroll
    for (int u = 0; u < kInstructions; ++u) {
#pragma unroll
      for (int i = 0; i < kSums / 4; ++i) {
        float (&own)[kSums] = sums[u];
        leave_sums(partials + (u * kSums / 4 + i) * kWarpgroupThreads,
                   make_float4(own[4 * i], own[4 * i + 1], own[4 * i + 2], own[4 * i + 3]), first);
        own[4 * i] = own[4 * i + 1] = own[4 * i + 2] = own[4 * i + 3] = 0.0f;
      }
    }
    first = false;
  }
  if constexpr (Traits::kSumsBias) {
    if (task.channel_block == 0) bias.leave(p, work, first_unit);
  }
}

template <class Traits>
__global__ void __launch_bounds__(kThreads, 1)
    sum_products(__grid_constant__ Params const p, __grid_constant__ Maps const maps) {
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& barriers = *reinterpret_cast<Barriers*>(shared + p.stages * Traits::kStageBytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.stages; ++i) {
      device::init_barrier(&barriers.full[i], 1);
      device::init_barrier(&barriers.empty[i], kConsumers * kWarpgroupWarps);
      device::init_barrier(&barriers.transposed[i], 32 * kInputBoxes<Traits>);
    }
    device::fence_barrier_init();
  }
  // Positions that no box has are zeros, in both operands: packed and transposed ones come so.
  constexpr int kBoxes = Traits::kBlock.unit_boxes();
  constexpr int kBoxBytes = kTileBytes / kBoxes;
  int const tail = kBoxBytes - p.box_bytes;
  if (tail > 0) {
    int const pieces = tail / kPieceBytes;
    int const all = p.stages * Traits::kBlock.tiles() * kBoxes * pieces;
    for (int i = threadIdx.x; i < all; i += kThreads) {
      int const box = i / pieces;
      *reinterpret_cast<uint4*>(shared + box * kBoxBytes + p.box_bytes +
                                (i - box * pieces) * kPieceBytes) = uint4{};
    }
    device::fence_async_proxy();
  }
  __syncthreads();
  int const role = __reduce_max_sync(~0u, int(threadIdx.x) / kWarpgroupThreads);
  if (role == kConsumers) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kOtherRegisters>();
    if (threadIdx.x == kConsumers * kWarpgroupThreads) fill_ring<Traits>(p, maps, barriers, shared);
    if constexpr (Traits::kBlock.transposes) {
      int const warp = int(threadIdx.x) / 32 - kConsumers * kWarpgroupWarps - 1;
      if (warp >= 0) {
        transpose_boxes<Traits>(p, barriers, shared, warp, int(threadIdx.x) % 32);
      }
    }
    return;
  }
  cutlass::arch::warpgroup_reg_alloc<Traits::kOwnRegisters>();
  consume<Traits>(p, barriers, shared, role, int(threadIdx.x) % kWarpgroupThreads);
}

}  // namespace fusedconv::conv::sm90::boxes::weight
