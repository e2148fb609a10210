// What the roles of streamed gradients share: tiles, as they are announced, and barriers.
#pragma once

#include <cstdint>
#include <type_traits>

#include "groupnorm/gradient_device.hpp"
#include "groupnorm/stream_device.hpp"
#include "groupnorm/streamed_gradients.hpp"

namespace fusedconv::groupnorm {

inline constexpr int kImages = kReplacerGroups + 1;  // of tiles: see gradient_images.hpp
inline constexpr int kPartials = kSummerGroups + 1;  // tiles whose sums by thread are under way

// Whether there may be an activation behind the affine map.
template <int kKnown>
inline constexpr bool kIsBehind =
    kKnown == kAnyActivation || !std::is_void_v<typename Known<kKnown>::After>;

// A stage's tile, as the thread that loads it leaves it for all who wait for it.
struct alignas(16) Tile {
  Channel channel;
  device_stream::Extent extent;
  unsigned unit;
  unsigned index;    // in the unit
  unsigned ordinal;  // of the unit among the block's
  unsigned whole;    // vectors up to the last that is all the tile's
  unsigned lead;     // vectors before the first
  bool is_last;      // of the block's in the unit
};

struct GradientShared {
  device_stream::Barriers barriers;
  uint64_t filled[kImages];    // an image is complete
  uint64_t emptied[kImages];   // and stored
  uint64_t summed[kPartials];  // a tile's sums by thread are there
  uint64_t added[kPartials];   // and read
  Tile tiles[kMaxStages];
  GroupTerms terms[kUnitStages];
  float2 partial[kPartials][kSummers];

  // As Barriers::init(), likewise.
  __device__ __forceinline__ void init(int stages, bool is_for_warps, bool has_images) {
    // Of sums, one warp reads tiles too. The store of an image does not free its tile's stage.
    constexpr int kReaders = kSummers / 32 + 32;
    barriers.init(stages, is_for_warps, kReaders - has_images, kReplacers);
    int const i = int(threadIdx.x);
    if (i < kImages) {
      device::init_barrier(&filled[i], kReplacers);
      device::init_barrier(&emptied[i], 1);
    }
    if (i < kPartials) {
      device::init_barrier(&summed[i], kSummers);
      device::init_barrier(&added[i], 32);
    }
    device::fence_async_proxy();
  }
};
static_assert(sizeof(GradientShared) <= static_shared_bytes(kStreamedTensors),
              "what the config sets aside");

__device__ __forceinline__ Tile tile_of(GradientAffine const& affine, Stream const& s,
                                        TableEntry const* table, device_stream::Walk const& walk,
                                        device_stream::Extent const& extent,
                                        device_stream::LaneUnits const& units) {
  unsigned const group = walk.unit % unsigned(affine.groups);
  TableEntry const entry = table[group * unsigned(affine.channels_per_group) + extent.run];
  return {{affine.mean[walk.unit], affine.rstd[walk.unit], entry.x, entry.y},
          extent,
          walk.unit,
          walk.tile,
          units.ordinal,
          extent.skip + extent.count >> s.vector_shift,
          device_stream::lead_of(s, walk, extent),
          units.is_last};
}

// Calls body(vector, whether it is not all the tile's) for the thread's vectors. Not unrolled, nor
// compiled apart for vectors that are all the tile's: warps in different roles compete for the
// instruction caches, and that took 1.5 times as long.
template <int kThreads, class Body>
__device__ __forceinline__ void for_vectors(Tile const& tile, int thread, Body const& body) {
  unsigned const first = tile.extent.skip > 0 ? 1 : 0, count = tile.whole - first;  // whole ones
#pragma unroll 1
  for (unsigned vector = thread; vector < tile.extent.vectors; vector += kThreads) {
    body(int(vector), vector - first >= count);
  }
}

// Makes zeros of the elements that are not the tile's.
template <class T, int kVector>
__device__ __forceinline__ void clear_others(Tile const& tile, Stream const& s, int vector,
                                             T (&values)[kVector]) {
#pragma unroll
  for (int e = 0; e < kVector; ++e) {
    if (!tile.extent.has(s, vector, e)) values[e] = device::from_float<T>(0.0f);
  }
}

}  // namespace fusedconv::groupnorm
