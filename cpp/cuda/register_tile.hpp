// Transposing between layouts in registers, where both take accesses of 16 bytes.
#pragma once

#include <cstdint>

#include "cuda/math.hpp"
#include "cuda/tile.hpp"

namespace fusedconv::device {

// One of a pack's values as float32, where i is known when compiled.
template <class T, int kCount>
__device__ __forceinline__ float value_of(Pack<T, kCount> const& pack, int i) {
  if constexpr (sizeof(T) == 2 && kCount % 2 == 0) {
    float2 const pair = to_pair<T>(pack.bits[i / 2]);
    return i % 2 == 0 ? pair.x : pair.y;
  } else {
    return to_float(pack.values[i]);
  }
}

// Stores 16 bytes to global memory at once. Where values come from many places the compiler splits
// a plain store into its words of 4 bytes.
template <class T, int kCount>
__device__ __forceinline__ void store_whole(T* target, Pack<T, kCount> const& pack) {
  static_assert(sizeof(T) * kCount == 16);
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(pack.bits[0]),
               "r"(pack.bits[1]), "r"(pack.bits[2]), "r"(pack.bits[3])
               : "memory");
}

// A tile that a block's threads hold in registers: of each thread kVectorChannels channels of
// kVectorPixels pixels, which are an access for each of the pixels channels last (of Last) and for
// each of the channels channels first (of First). A warp reads whole cache lines and writes halves
// of them: the other way round takes 2 to 3 % longer.
template <class Last, class First, bool kReadsLast>
struct RegisterTile {
  static constexpr int kVectorChannels = 16 / sizeof(Last);
  static constexpr int kVectorPixels = 16 / sizeof(First);
  static constexpr int kChannels = 64;
  static constexpr int kColumns = kChannels / kVectorChannels;  // threads side by side
  static constexpr int kPixels = kTileThreads / kColumns * kVectorPixels;

  // The thread's column, and its first pixel in the tile.
  int column, pixel;

  __device__ __forceinline__ RegisterTile() {
    constexpr int kLanes = kReadsLast ? 8 : 4;  // of a warp, side by side along channels
    constexpr int kWarps = kColumns / kLanes;
    int const lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
    column = warp % kWarps * kLanes + lane % kLanes;
    pixel = (warp / kWarps * (32 / kLanes) + lane / kLanes) * kVectorPixels;
  }
};

}  // namespace fusedconv::device
