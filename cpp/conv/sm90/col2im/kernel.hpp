// The kernel; schedule.hpp says what it computes and how.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <utility>

#include "conv/sm90/boxes/operand.hpp"
#include "conv/sm90/col2im/outputs.hpp"
#include "conv/sm90/col2im/params.hpp"
#include "conv/sm90/wait.hpp"
#include "cuda/async.hpp"
#include "cute/arch/cluster_sm90.hpp"
#include "cute/arch/copy_sm90_desc.hpp"
#include "cute/arch/copy_sm90_tma.hpp"

namespace fusedconv::conv::sm90::col2im {

using boxes::operand;
namespace gmma = boxes::gmma;

inline constexpr int kThreads = kConsumerThreads + 32;
inline constexpr int kFilterRows = 136;  // of a copy of a packed filter in float32, at most

struct Maps {
  CUtensorMap input;   // boxes of a chunk's channels
  CUtensorMap filter;  // of 16 bits lines of a chunk's channels, else rows of a chunk of them
};

struct Barriers {
  uint64_t full[kMostStages], empty[kMostStages];
};
static_assert(sizeof(Barriers) <= kBarrierBytes);

template <Math kMath_, Shape kShape_>
struct Traits {
  static constexpr Math kMath = kMath_;
  static constexpr Shape kShape = kShape_;
  static constexpr int kElementBytes = traits_of(kMath).element_bytes();
  static constexpr bool kLines = kElementBytes == 2;  // else rows of channels
  static constexpr gmma::Major kMajor = kLines ? gmma::Major::MN : gmma::Major::K;
  // An instruction has so many columns, and a second one the others, if any.
  static constexpr int kColumns = kShape.columns;
  static constexpr int kFirst = kColumns < kMostInstruction ? kColumns : kMostInstruction;
  static constexpr int kSecond = kColumns - kFirst;
  using First = boxes::Instruction<kMath, kFirst, gmma::Major::K, kMajor>;
  using Second = boxes::Instruction<kMath, kSecond == 0 ? 16 : kSecond, gmma::Major::K, kMajor>;
  using Element = typename First::Element;
  static constexpr int kChunk = kChunkBytes / kElementBytes;
  static constexpr int kSteps = kChunkBytes / kStepBytes;
  static constexpr int kBoxBytes = kShape.positions() * kChunkBytes;  // of a stage
  static constexpr int kStageBytes = kShape.stage_bytes(kElementBytes);
  static constexpr int kFilterBytes = kShape.filter_bytes(kElementBytes);
};

// A slab's products by column.
template <class Traits>
struct Products {
  float first[Traits::kFirst / 2];
  float second[Traits::kSecond == 0 ? 1 : Traits::kSecond / 2];

  template <class Body>
  __device__ __forceinline__ void each(Body const& body) {
#pragma unroll
    for (float& value : first) body(value);
    if constexpr (Traits::kSecond > 0) {
#pragma unroll
      for (float& value : second) body(value);
    }
  }
};

template <class Traits>
__device__ __forceinline__ void copy_chunks(Params const& p, Maps const& maps, Tile const& tile,
                                            Barriers& barriers, unsigned char* shared) {
  constexpr auto kHint = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  constexpr int kChunk = Traits::kChunk;
  device::RingCursor cursor{.stage = 0, .parity = 1};
  for (int chunk = 0; chunk < p.chunks; ++chunk) {
    uint64_t* const full = &barriers.full[cursor.stage];
    unsigned char* const box = shared + cursor.stage * Traits::kStageBytes;
    unsigned char* const filter = box + Traits::kBoxBytes;
    wait_for(&barriers.empty[cursor.stage], cursor.parity);
    device::arrive_and_expect(full, p.box_positions * kChunkBytes + Traits::kFilterBytes);
    cute::SM90_TMA_LOAD_5D::copy(&maps.input, full, kHint, box, chunk * kChunk, tile.origin[2],
                                 tile.origin[1], tile.origin[0], tile.sample);
    if constexpr (Traits::kLines) {
#pragma unroll 1
      for (int column = 0; column < Traits::kColumns; column += kLine) {
        cute::SM90_TMA_LOAD_5D::copy(&maps.filter, full, kHint, filter + column * kChunkBytes,
                                     column, chunk * kChunk, 0, 0, 0);
      }
    } else {
#pragma unroll 1
      for (int column = 0; column < Traits::kColumns; column += kFilterRows) {
        cute::SM90_TMA_LOAD_5D::copy(&maps.filter, full, kHint, filter + column * kChunkBytes,
                                     chunk * kChunk, column, 0, 0, 0);
      }
    }
    cursor.advance(p.stages);
  }
}

template <class Traits>
__device__ __forceinline__ void multiply(Params const& p, Barriers& barriers, unsigned char* shared,
                                         int self,
                                         Products<Traits> (&products)[Traits::kShape.slabs]) {
  constexpr int kSlabs = Traits::kShape.slabs;
  constexpr int kSlabBytes = kSlab * kChunkBytes;
  uint32_t const base = device::shared_address(shared);
  uint64_t const positions0 =
      operand(base + self * kSlabs * kSlabBytes, gmma::LayoutType::B128, 0, 8 * kChunkBytes);
  uint32_t const filter = base + Traits::kBoxBytes;
  // Lines of columns lie by 64 of them, each for all of a chunk's channels in turn.
  uint64_t const filter0 =
      Traits::kLines
          ? operand(filter, gmma::LayoutType::B128, Traits::kChunk * kChunkBytes, 8 * kChunkBytes)
          : operand(filter, gmma::LayoutType::B128, 0, 8 * kChunkBytes);
  constexpr int kStepChannels = kStepBytes / Traits::kElementBytes;
  constexpr uint32_t kFilterStep = (Traits::kLines ? kStepChannels * kChunkBytes : kStepBytes) >> 4;
  constexpr uint32_t kSecondFilter = Traits::kFirst * kChunkBytes >> 4;
  for (auto& slab : products) slab.each([](float& value) { value = 0.0f; });
  for (auto& slab : products) {
    slab.each([](float& value) { cute::warpgroup_fence_operand(value); });
  }
  device::RingCursor cursor;
  int in_flight = -1;
#pragma unroll 1
  for (int chunk = 0; chunk < p.chunks; ++chunk) {
    uint32_t const offset = uint32_t(cursor.stage * Traits::kStageBytes) >> 4;
    wait_for(&barriers.full[cursor.stage], cursor.parity);
    cute::warpgroup_arrive();
#pragma unroll
    for (int i = 0; i < kSlabs; ++i) {
      uint64_t const positions = positions0 + offset + (i * kSlabBytes >> 4);
#pragma unroll
      for (int step = 0; step < Traits::kSteps; ++step) {
        uint64_t const a = positions + (step * kStepBytes >> 4);
        uint64_t const b = filter0 + offset + step * kFilterStep;
        boxes::multiply<typename Traits::First::Mma>(
            a, b, products[i].first, std::make_integer_sequence<int, Traits::kFirst / 2>{});
        if constexpr (Traits::kSecond > 0) {
          boxes::multiply<typename Traits::Second::Mma>(
              a, b + kSecondFilter, products[i].second,
              std::make_integer_sequence<int, Traits::kSecond / 2>{});
        }
      }
    }
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<1>();
    if (in_flight >= 0 && cute::elect_one_sync()) device::arrive(&barriers.empty[in_flight]);
    in_flight = cursor.stage;
    cursor.advance(p.stages);
  }
  cute::warpgroup_wait<0>();
  for (auto& slab : products) {
    slab.each([](float& value) { cute::warpgroup_fence_operand(value); });
  }
}

// To rows of products, one for each position.
template <class Traits>
__device__ __forceinline__ void leave_products(Products<Traits> (&products)[Traits::kShape.slabs],
                                               int self, float* rows) {
  constexpr int kPitch = Traits::kShape.pitch();
  int const lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32 % 4;
#pragma unroll
  for (int i = 0; i < Traits::kShape.slabs; ++i) {
    int const row = (self * Traits::kShape.slabs + i) * kSlab + warp * 16 + lane / 4;
    float* const own[2] = {rows + begin_of<kPitch>(row) + lane % 4 * 2,
                           rows + begin_of<kPitch>(row + 8) + lane % 4 * 2};
    auto const leave = [&](auto const& values, int first, int count) {
#pragma unroll
      for (int j = 0; j < count / 4; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          *reinterpret_cast<float2*>(own[half] + first + j * 8) = {values[j * 4 + half * 2],
                                                                   values[j * 4 + half * 2 + 1]};
        }
      }
    };
    leave(products[i].first, 0, Traits::kFirst / 2);
    if constexpr (Traits::kSecond > 0) {
      leave(products[i].second, Traits::kFirst, Traits::kSecond / 2);
    }
  }
}

template <class Traits>
__global__ void __launch_bounds__(kThreads, 1)
    convolve(__grid_constant__ Params const p, __grid_constant__ Maps const maps) {
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& barriers = *reinterpret_cast<Barriers*>(shared + p.reserved);
  auto* const maps_of_channels = reinterpret_cast<float2*>(shared + p.reserved + kBarrierBytes);
  auto* const reaches = reinterpret_cast<Reach*>(shared + p.reaches);
  if (threadIdx.x == kConsumerThreads) {
    cute::prefetch_tma_descriptor(&maps.input);
    cute::prefetch_tma_descriptor(&maps.filter);
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.stages; ++i) {
      device::init_barrier(&barriers.full[i], 1);
      device::init_barrier(&barriers.empty[i], kConsumerThreads / 32);
    }
    device::fence_barrier_init();
  }
  __syncthreads();
  Tile const tile(p);
  // Uniform, as the compiler sees it too.
  int const role = __reduce_max_sync(~0u, int(threadIdx.x) / kWarpgroup);
  if (role == kConsumers) {
    if (cute::elect_one_sync()) copy_chunks<Traits>(p, maps, tile, barriers, shared);
    return;
  }
  using Element = typename Traits::Element;
  constexpr int kPitch = Traits::kShape.pitch();
  list_reaches<kConsumerThreads>(p, tile, reaches);
  list_maps<Element, kConsumerThreads>(p, maps_of_channels);
  Products<Traits> products[Traits::kShape.slabs];
  multiply<Traits>(p, barriers, shared, role, products);
  // All products have read the ring, where their sums go.
  device::sync_threads(kConsumerBarrier, kConsumerThreads);
  float* const rows = reinterpret_cast<float*>(shared);
  float* const zeros = rows + Traits::kShape.positions() * kPitch;
  leave_products<Traits>(products, role, rows);
  for (int i = int(threadIdx.x); i < kPitch; i += kConsumerThreads) zeros[i] = 0.0f;
  device::sync_threads(kConsumerBarrier, kConsumerThreads);
  auto* const staged = reinterpret_cast<Element*>(shared + Traits::kShape.products_bytes());
  if (p.short_taps) {
    store_all<Element, kConsumerThreads, kPitch, true>(p, tile, reaches, maps_of_channels, rows,
                                                       zeros, staged);
  } else {
    store_all<Element, kConsumerThreads, kPitch, false>(p, tile, reaches, maps_of_channels, rows,
                                                        zeros, staged);
  }
}

}  // namespace fusedconv::conv::sm90::col2im
