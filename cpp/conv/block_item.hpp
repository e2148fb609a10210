// How persistent blocks share tiles of positions and blocks of channels.
#pragma once

#include <cstdint>

namespace fusedconv::conv {

// What the block `rank` of `ranks` computes in turn, of tiles by `blocks` (of channels, say). It
// takes all blocks of a tile in sequence, so that blocks with more taps than others burden none,
// and a tile's input is in the cache. Tiles that are left over are divided by blocks, in
// their order, and dealt to ranks forth and back: where those with the most taps are first, who has
// many taps is the last to get more.
class BlockItems {
 public:
  int tile;
  int block = 0;

  __device__ __forceinline__ BlockItems(int rank, int ranks, int tiles, int blocks)
      : tile(rank),
        ranks_(ranks),
        blocks_(blocks),
        whole_(tiles / ranks * ranks),
        left_(tiles - whole_),
        dealt_(ranks),
        index_(rank) {
    if (tile >= whole_) locate();
  }

  __device__ __forceinline__ bool present() const {
    return tile < whole_ || index_ < left_ * blocks_;
  }
  __device__ __forceinline__ void advance() {
    if (tile < whole_) {
      if (++block < blocks_) return;
      block = 0;
      tile += ranks_;
      if (tile < whole_) return;
    } else {
      index_ = dealt_ + (dealt_ - 1 - index_);
      dealt_ += ranks_;
    }
    locate();
  }

 private:
  __device__ __forceinline__ void locate() {
    if (left_ == 0) return;
    block = index_ / left_;
    tile = whole_ + (index_ - block * left_);
  }

  int ranks_, blocks_, whole_, left_;  // tiles of whole rounds, and those left over
  int dealt_, index_;                  // of what is left over: up to this rank's, and its own
};

// Tiles by blocks that items count.
inline constexpr int64_t kMostItems = (int64_t(1) << 30) - 1;

}  // namespace fusedconv::conv
