// Boxes of the input in TF32, transposed where they lie by the warps beside the thread that copies:
// of 32 positions' rows of 32 channels become 32 channels' rows of 32 positions, swizzled alike.
#pragma once

#include <cstdint>

#include "conv/sm90/boxes/weight/barriers.hpp"
#include "conv/sm90/boxes/weight/params.hpp"
#include "conv/sm90/wait.hpp"
#include "cuda/async.hpp"

namespace fusedconv::conv::sm90::boxes::weight {

inline constexpr int kTransposingWarps = kWarpgroupWarps - 1;

// A lane's two blocks of four positions by four channels. Pieces are a row's 16 bytes: of channels
// the lane's number's low bits q, of positions those bits exchanged, less what tells eights of
// lanes and blocks apart. So each eight lanes, which shared memory serves at once, read different
// pieces of rows and write different pieces of rows, as swizzles have them.
class LaneBlocks {
 public:
  __device__ __forceinline__ explicit LaneBlocks(int lane) {
    uint32_t const q = uint32_t(lane) % 8;
    first_ = ((q & 4) | (q & 1) << 1 | (q & 2) >> 1) ^ uint32_t(lane) / 8;
    read_ = first_ * (4 * kChunkBytes) + ((q ^ (first_ & 1) * 4) * kPieceBytes);
    written_ = q * (4 * kChunkBytes) + ((first_ ^ (q & 1) * 4) * kPieceBytes);
  }

  // positions: of the box; the rows behind them are left from boxes before.
  __device__ __forceinline__ void transpose(unsigned char* box, int positions) const {
    // Sixteen offsets would be kept beside what is loaded, which leaves no registers for them.
    uint32_t read = read_, written = written_;
    asm volatile("" : "+r"(read), "+r"(written));
    uint4 rows[2][4];
#pragma unroll
    for (int block = 0; block < 2; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        rows[block][i] = *reinterpret_cast<uint4 const*>(box + (read ^ at(block * 16, i)));
        if (int((first_ ^ uint32_t(block) * 4) * 4) + i >= positions) rows[block][i] = uint4{};
      }
    }
    __syncwarp();
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      uint4 const(&from)[4] = rows[block];
      auto const store = [&](int i, uint32_t uint4::* channel) {
        *reinterpret_cast<uint4*>(box + (written ^ (block * 4 * kPieceBytes) ^ at(0, i))) =
            make_uint4(from[0].*channel, from[1].*channel, from[2].*channel, from[3].*channel);
      };
      store(0, &uint4::x);
      store(1, &uint4::y);
      store(2, &uint4::z);
      store(3, &uint4::w);
    }
  }

 private:
  // So many rows on, of which the fours begin where a swizzle exchanges nothing within them.
  __device__ __forceinline__ static constexpr uint32_t at(int rows, int row) {
    return uint32_t(rows * kChunkBytes + row * (kChunkBytes + kPieceBytes));
  }

  uint32_t first_;  // piece of positions of the first block; of the second it plus or less 4
  uint32_t read_, written_;  // where the first block's rows begin in a box
};

// Of a stage, each announced to the products by itself.
template <class Traits>
inline constexpr int kInputBoxes = Traits::kBlock.channels * Traits::kBlock.unit_boxes();

// Warps take the boxes of all stages in turn, so that what one waits for others fill.
template <class Traits>
__device__ __forceinline__ void transpose_boxes(Params const& p, Barriers& barriers,
                                                unsigned char* shared, int warp, int lane) {
  constexpr int kBoxBytes = kTileBytes / Traits::kBlock.unit_boxes();
  LaneBlocks const blocks(lane);
  BlockWork const work(p);
  int const positions = p.box_bytes / kChunkBytes;
  int left = work.last(p) - work.first(p);
  device::RingCursor cursor;
  for (int box = warp;; box += kTransposingWarps) {
    for (; box >= kInputBoxes<Traits>; box -= kInputBoxes<Traits>) {
      cursor.advance(p.stages);
      --left;
    }
    if (left <= 0) return;
    wait_for(&barriers.full[cursor.stage], cursor.parity);
    blocks.transpose(shared + cursor.stage * Traits::kStageBytes + box * kBoxBytes, positions);
    device::fence_async_proxy();  // the products read it
    // By all lanes: racecheck does not follow one that arrives for its warp behind __syncwarp.
    device::arrive(&barriers.transposed[cursor.stage]);
  }
}

}  // namespace fusedconv::conv::sm90::boxes::weight
