// A warpgroup that multiplies and finishes tiles. While a tap's products run, the next tap's are
// issued; a block of the filter is released when its products have ended.
#pragma once

#include <bit>
#include <cstdint>
#include <utility>

#include "conv/taps/sm90/epilogue.hpp"
#include "conv/taps/sm90/params.hpp"
#include "conv/taps/sm90/producer.hpp"
#include "conv/taps/sm90/traits.hpp"
#include "cuda/async.hpp"
#include "cuda/cluster.hpp"
#include "cute/arch/mma_sm90_desc.hpp"
#include "cutlass/arch/barrier.h"

namespace fusedconv::conv::taps::sm90 {

// K-major core matrices of 8 rows times 16 bytes without swizzle. leading: 16-byte units from a
// piece of channels to the next; stride: from 8 rows to the next 8.
__device__ __forceinline__ uint64_t operand(uint32_t address, int leading, int stride) {
  cute::GmmaDescriptor result;
  result.bitfield.start_address_ = uint16_t(address >> 4);
  result.bitfield.leading_byte_offset_ = uint16_t(leading);
  result.bitfield.stride_byte_offset_ = uint16_t(stride);
  result.bitfield.layout_type_ = uint8_t(gmma::LayoutType::INTERLEAVE);
  return result.desc_;
}

template <class Mma, int... kIndex>
__device__ __forceinline__ void multiply(uint64_t a, uint64_t b, float (&sum)[sizeof...(kIndex)],
                                         std::integer_sequence<int, kIndex...>) {
  Mma::fma(a, b, sum[kIndex]...);
}

// Adds up what the blocks of a cluster have of one tile, in the order of their ranks. Each adds a
// share of the values for all; the first block collects these, and returns true.
template <class Traits>
__device__ __forceinline__ bool add_up(Params const& p, Accumulators<Traits>& sums,
                                       unsigned char* shared, int consumer) {
  constexpr int kPacks = Traits::kRowGroups * Traits::kColumns / 8;  // of 4 values, of a thread
  constexpr int kPackShift = std::bit_width(unsigned(kPacks)) - 1;
  static_assert(kPacks == 1 << kPackShift && kPacks % kMostSplits == 0, "shares of whole packs");
  auto* const own = reinterpret_cast<float4*>(shared + p.memory.boxes) +
                    consumer * kPacks * kWarpgroupThreads + threadIdx.x % kWarpgroupThreads;
  auto const part = [&](int pack, int rank) {
    return device::load_of_cluster(device::shared_address(own + pack * kWarpgroupThreads), rank);
  };
  int const rank = int(device::cluster_rank());
  int const share_shift = kPackShift - p.split_shift;
  // Both consumers have read what lay here.
  device::sync_threads(kConsumerBarrier + kConsumers, kConsumers * kWarpgroupThreads);
  for_each_pack<Traits>(sums, [&](int pack, float (&values)[4]) {
    own[pack * kWarpgroupThreads] = {values[0], values[1], values[2], values[3]};
  });
  device::sync_cluster();
  for (int pack = rank << share_shift; pack < (rank + 1) << share_shift; ++pack) {
    float4 total = part(pack, 0);
    for (int other = 1; other < 1 << p.split_shift; ++other) {
      float4 const more = part(pack, other);
      total.x += more.x;
      total.y += more.y;
      total.z += more.z;
      total.w += more.w;
    }
    own[pack * kWarpgroupThreads] = total;
  }
  device::sync_cluster();
  if (rank == 0) {
    for_each_pack<Traits>(sums, [&](int pack, float (&values)[4]) {
      float4 const total = part(pack, pack >> share_shift);
      values[0] = total.x;
      values[1] = total.y;
      values[2] = total.z;
      values[3] = total.w;
    });
  }
  device::sync_cluster();
  return rank == 0;
}

template <class Traits>
__device__ __forceinline__ void consume(Params const& p, Barriers& barriers, unsigned char* shared,
                                        int consumer) {
  using T = typename Traits::Element;
  using Mma = typename Traits::Mma;
  using Indices = std::make_integer_sequence<int, Traits::kSums>;
  constexpr int kRowGroups = Traits::kRowGroups;
  int const lane = threadIdx.x % 32;
  int const warp = __reduce_max_sync(~0u, threadIdx.x % kWarpgroupThreads / 32);
  int const tile_columns = Traits::kColumns * (p.shares_rows ? kConsumers : 1);
  int const first_column = p.shares_rows ? consumer * Traits::kColumns : 0;
  int const box_w = p.box[2];
  // 16-byte units from the tile's first position in a stage to the consumer's first.
  // To the columns of the next instruction.
  int const mma_units = p.order == Order::kEights   ? Traits::kMmaColumns / 8 * box_w
                        : p.order == Order::kStrips ? 8
                                                    : Traits::kMmaColumns;
  int const own = p.lead + first_column / Traits::kMmaColumns * mma_units;
  int const eight_units = p.order == Order::kEights || p.order == Order::kStrips ? box_w : 8;
  uint32_t const start = device::shared_address(shared);
  uint64_t const box0 = operand(start + p.memory.boxes, p.positions, eight_units) + uint32_t(own);
  uint32_t const b_step = 2 * uint32_t(p.positions);
  constexpr int kMostSteps = 4;  // of a chunk
  uint64_t const filter0 = operand(start + p.memory.filter, kInstructionRows, 8);
  uint32_t const box_units = uint32_t(p.memory.box_bytes) >> 4;
  uint32_t const slot_units = uint32_t(p.memory.slot_bytes) >> 4;
  auto* const columns =
      reinterpret_cast<Column*>(shared + p.memory.columns) + consumer * Traits::kColumns;
  auto* const staged = reinterpret_cast<T*>(
      shared + p.memory.values + (consumer * kWarpgroupWarps + warp) * p.memory.warp_bytes);
  device::RingCursor box;
  device::RingCursor filter;
  int const first_slot = p.shares_rows ? 0 : consumer * p.slots;
  Share const share(p, Traits::kSplitsChannels);
  for (Items item(p); item.present(); item.advance()) {
    Place const place(p, item, tile_columns);
    RowGroup groups[kRowGroups];
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i) {
      groups[i] = RowGroup(p, place.block_m, consumer, i, kRowGroups);
    }
    Linear<Traits> const linear(p, place, groups, warp);
    // Nobody reads the columns of the tile before.
    device::sync_threads(kConsumerBarrier + consumer, kWarpgroupThreads);
    for (int i = threadIdx.x % kWarpgroupThreads; i < Traits::kColumns; i += kWarpgroupThreads) {
      columns[i] = column_of(p, place, first_column + i, Traits::kMmaColumns);
    }
    device::sync_threads(kConsumerBarrier + consumer, kWarpgroupThreads);

    Accumulators<Traits> sums;
    for_each_sum<Traits>(sums, [](float& value) { value = 0.0f; });
    for_each_sum<Traits>(sums, [](float& value) { cute::warpgroup_fence_operand(value); });
    Stream const stream(p, place.block_m, kRowGroups);
    int const end = stream.total == 0 ? share.first : share.end;
    for (int chunk = share.first; chunk < end; ++chunk) {
      int const steps = chunk == p.chunks - 1 ? p.last_steps : p.pieces / 2;
      cutlass::arch::ClusterBarrier::wait(&barriers.full_box[box.stage], box.parity);
      uint64_t const positions = box0 + box.stage * box_units;
      int in_flight = -1;  // the slot that products in flight read
      auto const release = [&](int slot) {
        if (slot >= 0 && lane == 0) device::arrive(&barriers.empty_slot[slot]);
      };
#pragma unroll
      for (int group = 0; group < kRowGroups; ++group) {
        int const first = groups[group].first_tap(p);
        int const count = groups[group].taps(p);
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
          int const slot = first_slot + filter.stage;
          uint64_t a = filter0 + slot * slot_units;
          uint64_t b = positions + uint32_t(p.offset[first + i]);
          cutlass::arch::ClusterBarrier::wait(&barriers.full_slot[slot], filter.parity);
          filter.advance(p.slots);
          if constexpr (Traits::kSplits) {
            static_assert(Traits::kMmas == 1);
            uint32_t const small_a = uint32_t(p.pieces) * kInstructionRows;
            uint32_t const small_b = uint32_t(p.pieces) * p.positions;
            float products[Traits::kSums];
#pragma unroll
            for (float& value : products) {
              value = 0.0f;
              cute::warpgroup_fence_operand(value);
            }
            cute::warpgroup_arrive();
            // Small products first: what tensor cores cut off of a sum is a share of its size.
#pragma unroll 1
            for (int step = 0; step < steps; ++step) {
              int const at_a = step * 2 * kInstructionRows, at_b = step * int(b_step);
              multiply<Mma>(a + (small_a + at_a), b + at_b, products, Indices{});
              multiply<Mma>(a + at_a, b + (small_b + at_b), products, Indices{});
            }
#pragma unroll 1
            for (int step = 0; step < steps; ++step) {
              multiply<Mma>(a, b, products, Indices{});
              a += 2 * kInstructionRows;
              b += b_step;
            }
            cute::warpgroup_commit_batch();
            cute::warpgroup_wait<0>();
#pragma unroll
            for (float& value : products) cute::warpgroup_fence_operand(value);
            release(slot);
#pragma unroll
            for (int v = 0; v < Traits::kSums; ++v) sums[group][0][v] += products[v];
          } else {
            cute::warpgroup_arrive();
            auto const step_by = [&] {
#pragma unroll
              for (int i = 0; i < Traits::kMmas; ++i) {
                multiply<Mma>(a, b + i * mma_units, sums[group][i], Indices{});
              }
              a += 2 * kInstructionRows;
              b += b_step;
            };
            if (steps == kMostSteps) {
#pragma unroll
              for (int step = 0; step < kMostSteps; ++step) step_by();
            } else {
#pragma unroll 1
              for (int step = 0; step < steps; ++step) step_by();
            }
            cute::warpgroup_commit_batch();
            cute::warpgroup_wait<1>();
            release(in_flight);
            in_flight = slot;
          }
        }
      }
      cute::warpgroup_wait<0>();
      for_each_sum<Traits>(sums, [](float& value) { cute::warpgroup_fence_operand(value); });
      release(in_flight);
      if (lane == 0) device::arrive(&barriers.empty_box[box.stage]);
      box.advance(p.stages);
    }
    if constexpr (Traits::kSplitsChannels) {
      if (p.split_shift > 0 && !add_up<Traits>(p, sums, shared, consumer)) return;
    }
    finish<Traits>(p, place, groups, consumer, warp, sums, linear, columns, staged);
  }
}

}  // namespace fusedconv::conv::taps::sm90
