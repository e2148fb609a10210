// How persistent blocks share tiles of positions and blocks of channels.
#pragma once

#include <cstdint>

namespace fusedconv::conv {

// What the block `rank` of `ranks` computes in its turn, of tiles by `blocks` (of channels, say).
// It takes all blocks of a tile in sequence, so that blocks with more taps than others burden none,
// and a tile's input is in the cache. Tiles that are left over are divided by blocks.
struct BlockItem {
  bool present;
  int tile;
  int block;

  __device__ __forceinline__ BlockItem(int turn, int rank, int ranks, int tiles, int blocks) {
    int const rounds = tiles / ranks;
    if (turn < rounds * blocks) {
      present = true;
      tile = rank + turn / blocks * ranks;
      block = turn % blocks;
      return;
    }
    int const left = tiles - rounds * ranks;
    int64_t const index = rank + int64_t(turn - rounds * blocks) * ranks;
    present = index < int64_t(left) * blocks;
    if (!present) return;
    block = int(index / left);
    tile = rounds * ranks + int(index % left);
  }
};

// Tiles by blocks that items count.
inline constexpr int64_t kMostItems = (int64_t(1) << 30) - 1;

}  // namespace fusedconv::conv
