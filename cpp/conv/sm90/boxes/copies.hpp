// Tensor maps of a launch, and the thread that fills the ring.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "conv/sm90/boxes/params.hpp"
#include "conv/sm90/boxes/traits.hpp"
#include "conv/sm90/wait.hpp"
#include "cuda/async.hpp"
#include "cute/arch/copy_sm90_tma.hpp"

namespace fusedconv::conv::sm90::boxes {

// For boxes of a slab and a chunk of channels.
struct Maps {
  CUtensorMap reads[kMostPhases];   // the input: whole, or where it is gathered by sources
  CUtensorMap writes[kMostPhases];  // the output: channels last by phases, channels first by sets
  CUtensorMap saved[kMostPhases];   // what is saved, likewise
  CUtensorMap weight;               // what a chunk has of a tap, where that is read as it lies
};

struct Barriers {
  uint64_t full[kMostStages], empty[kMostStages];
  uint64_t kept;  // a filter that stays
  uint64_t full_boxes[kHaloStages], empty_boxes[kHaloStages];
};
static_assert(sizeof(Barriers) <= Memory::kBarrierBytes);

// Phases of a block of columns whose taps a copy of the filter has.
template <class Traits>
__device__ __forceinline__ int filter_phases(Params const& p, Block const& block, int tap) {
  if constexpr (Traits::kSegments > 1) return __popc(p.masks[block.first_tap + tap]);
  return p.set_phases[block.set];
}

// Of a tap's and chunk's part of the filter. Packed, that of a row with one segment has room for
// columns of no phase.
template <class Traits>
__device__ __forceinline__ int filter_bytes_of(Params const& p, Block const& block, int tap) {
  if (Traits::kSegments == 1 && (p.packed || !Traits::kFilterLines)) {
    return Traits::kColumns * kChunkBytes;
  }
  return filter_phases<Traits>(p, block, tap) * p.segment * kChunkBytes;
}

// That part, from `packed` or as the weight lies: what gathers reads rows of the only set's tap,
// else lines of each phase's.
template <class Traits>
__device__ __forceinline__ void copy_filter(Params const& p, Maps const& maps, Block const& block,
                                            int channel, int tap, unsigned char const* packed,
                                            int bytes, unsigned char* to, uint64_t* full) {
  constexpr auto kHint = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  if (p.packed) {
    device::bulk_load(device::shared_address(to), packed, bytes, full);
  } else if constexpr (Traits::kFilterLines) {
    uint16_t const* const taps = p.filter_taps + p.first_filter_tap[block.first_tap + tap];
    int const phases = filter_phases<Traits>(p, block, tap), line = block.channel >> p.line_shift;
#pragma unroll 1
    for (int i = 0; i < phases; ++i, to += p.segment * kChunkBytes) {
      cute::SM90_TMA_LOAD_5D::copy(&maps.weight, full, kHint, to, 0, channel, line, taps[i], 0);
    }
  } else {
    cute::SM90_TMA_LOAD_5D::copy(&maps.weight, full, kHint, to, channel, tap, block.channel, 0, 0);
  }
}

// The whole filter of a block of columns, in the order of its steps.
template <class Traits>
__device__ __forceinline__ void keep_filter(Params const& p, Maps const& maps, Block const& block,
                                            Barriers& barriers, unsigned char* kept) {
  constexpr int kRoomBytes = Traits::kColumns * kChunkBytes;
  // A block's taps are those of all its phases.
  int const bytes = filter_bytes_of<Traits>(p, block, 0);
  device::arrive_and_expect(&barriers.kept, block.taps * p.chunks * bytes);
  unsigned char const* packed = p.filter + block.filter * kChunkBytes;
  for (int chunk = 0; chunk < p.chunks; ++chunk) {
    for (int tap = 0; tap < block.taps; ++tap) {
      copy_filter<Traits>(p, maps, block, chunk * Traits::kChunk, tap, packed, bytes, kept,
                          &barriers.kept);
      packed += kRoomBytes;
      kept += kRoomBytes;
    }
  }
}

// The steps of the producer `self` of all, a thread each, which take every kProducers-th and by it
// stages of their own. How long a thread takes for a step bounds what a ring with short products
// brings: it goes from one of its steps straight to the next.
template <class Traits>
__device__ __forceinline__ void fill_ring(Params const& p, Maps const& maps, Barriers& barriers,
                                          unsigned char* shared, int self) {
  constexpr int kSlabs = Traits::kShape.slabs(), kProducers = Traits::kProducers;
  device::RingCursor cursor{.stage = self, .parity = 1};
  device::RingCursor boxes{.stage = 0, .parity = 1};
  int step = self;  // of the tile, or of tiles behind it
  for (Items<Traits> item(p); item.present(); item.advance()) {
    Block const block(p, item.block);
    int const taps = block.taps, steps = taps * p.chunks;
    if (kProducers > 1 && step >= steps) {
      step -= steps;
      continue;
    }
    int const tile = item.tile * kSlabs;
    Slab const slabs[2] = {Slab(p, tile), Slab(p, tile + 1)};
    bool const second = kSlabs == 2 && slabs[1].present;
    int const boxes_bytes = p.box_bytes * (second ? 2 : 1);
    unsigned char const* filter = p.filter + block.filter * kChunkBytes;
    int tap = step, channel = 0;
    auto const wrap_tap = [&] {
      for (; tap >= taps; channel += Traits::kChunk) tap -= taps;
    };
    if constexpr (kProducers > 1) wrap_tap();
#pragma unroll 1
    for (; step < steps; step += kProducers) {
      TapCopy const copied = p.taps[block.first_tap + tap];
      CUtensorMap const* const map = &maps.reads[copied.source];
      int filter_bytes = 0;
      if constexpr (!Traits::kStationary) filter_bytes = filter_bytes_of<Traits>(p, block, tap);
      uint64_t* const full = &barriers.full[cursor.stage];
      unsigned char* const stage =
          shared + p.memory.ring + cursor.stage * Traits::kShape.stage_bytes();
      auto const copy_box = [&](int i, unsigned char* to, uint64_t* full) {
        int const column = slabs[i].origin[2] + copied.shift[2];
        cute::SM90_TMA_LOAD_5D::copy(map, full, uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                                     to, Traits::kPlanes ? column : channel,
                                     Traits::kPlanes ? channel : column,
                                     slabs[i].origin[1] + copied.shift[1],
                                     slabs[i].origin[0] + copied.shift[0], slabs[i].sample);
      };
      if constexpr (Traits::kHalo) {
        if (p.starts_box[block.first_tap + tap]) {
          uint64_t* const full = &barriers.full_boxes[boxes.stage];
          unsigned char* const to = shared + boxes.stage * kSlabs * p.halo_bytes;
          wait_for(&barriers.empty_boxes[boxes.stage], boxes.parity);
          device::arrive_and_expect(full, boxes_bytes);
          copy_box(0, to, full);
          if (second) copy_box(1, to + p.halo_bytes, full);
          boxes.advance(kHaloStages);
        }
      }
      wait_for(&barriers.empty[cursor.stage], cursor.parity);
      device::arrive_and_expect(full, (Traits::kHalo ? 0 : boxes_bytes) + filter_bytes);
      if constexpr (!Traits::kHalo) {
        copy_box(0, stage, full);
        if (second) copy_box(1, stage + kSlab * kChunkBytes, full);
      }
      if constexpr (!Traits::kStationary) {
        copy_filter<Traits>(p, maps, block, channel, tap, filter, filter_bytes,
                            stage + (Traits::kHalo ? 0 : kSlabs * kSlab * kChunkBytes), full);
        filter += filter_bytes;
      }
      cursor.step(kProducers, p.stages);
      tap += kProducers;
      wrap_tap();
    }
    step -= steps;
  }
}

}  // namespace fusedconv::conv::sm90::boxes
