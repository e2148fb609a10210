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

// For boxes of a slab and a chunk of channels. Of a convolution that scatters: of the input whole;
// of the output, and of what is saved, channels last by phases' pixels, channels first by sets'. Of
// one that gathers: of the output whole and of the input by sources.
struct Maps {
  CUtensorMap whole;
  CUtensorMap parts[kMostPhases];
  CUtensorMap saved[kMostPhases];
  CUtensorMap weight;  // for rows of a tap and a chunk, where that is read as it lies
};

struct Barriers {
  uint64_t full[kMostStages], empty[kMostStages];
};
static_assert(sizeof(Barriers) <= Memory::kBarrierBytes);

template <class Traits>
__device__ __forceinline__ void fill_ring(Params const& p, Maps const& maps, Barriers& barriers,
                                          unsigned char* shared) {
  device::RingCursor cursor;
  cursor.parity = 1;
  for (Items item(p); item.present(); item.advance()) {
    Block const block(p, item.block);
    constexpr int kSlabs = Traits::kShape.slabs();
    int const tile = item.tile * kSlabs;
    Slab const slabs[kConsumers] = {Slab(p, tile), Slab(p, tile + 1)};
    int const box_bytes = p.box_bytes * (kSlabs == 2 && slabs[1].present ? 2 : 1);
    unsigned char const* filter = p.filter + block.filter * kChunkBytes;
    for (int chunk = 0; chunk < p.chunks; ++chunk) {
      for (int tap = block.first_tap; tap < block.first_tap + block.taps; ++tap) {
        Tap const shift = p.taps[tap];
        int const segments = Traits::kSegments == 1 ? 1 : __popc(p.masks[tap]);
        int const filter_bytes = segments * Traits::kSegmentColumns * kChunkBytes;
        uint64_t* const full = &barriers.full[cursor.stage];
        unsigned char* const stage = shared + cursor.stage * Traits::kShape.stage_bytes();
        wait_for(&barriers.empty[cursor.stage], cursor.parity);
        device::arrive_and_expect(full, box_bytes + filter_bytes);
#pragma unroll
        for (int i = 0; i < kSlabs; ++i) {
          if (!slabs[i].present) continue;
          int const channel = chunk * Traits::kChunk, column = slabs[i].origin[2] + shift[2];
          cute::SM90_TMA_LOAD_5D::copy(
              p.gathers ? &maps.parts[p.tap_sources[tap]] : &maps.whole, full,
              uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL), stage + i * kSlab * kChunkBytes,
              Traits::kPlanes ? column : channel, Traits::kPlanes ? channel : column,
              slabs[i].origin[1] + shift[1], slabs[i].origin[0] + shift[0], slabs[i].sample);
        }
        unsigned char* const rows = stage + kSlabs * kSlab * kChunkBytes;
        if (p.packed) {
          device::bulk_load(device::shared_address(rows), filter, filter_bytes, full);
        } else {
          cute::SM90_TMA_LOAD_5D::copy(&maps.weight, full,
                                       uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL), rows,
                                       chunk * Traits::kChunk, tap, block.channel, 0, 0);
        }
        filter += filter_bytes;
        cursor.advance(p.stages);
      }
    }
  }
}

}  // namespace fusedconv::conv::sm90::boxes
