// Streaming: all multiprocessors together hold a few groups in shared memory, so that each element
// is read from DRAM once. One block per multiprocessor. The tensor is a sequence of units, a
// sample's group each, and a unit one of tiles, which are dealt to the blocks in turn; a block's
// next tiles lie in the stages of a ring. Where groups are small, blocks are in teams, and units
// are dealt to the teams: what follows a block's last tile of a unit takes as long as some tiles.
// The roles of a block's warps:
//   1. A warp loads the block's tiles into the ring, and leaves beside each what the others would
//      all have to find out.
//   2. kWorkers threads take the block's share of each unit's statistics (of gradients groups of
//      threads do, a tile each); where an activation is in front, they replace each tile by what it
//      gives. A warp beside them adds up what they took, and publishes it.
//   3. Merging warps wait for all blocks' shares of a unit, and merge them in the same order in
//      every block.
//   4. kWorkers threads read each tile once more, and replace it by its result; of gradients
//      groups of threads do, a tile each.
//   5. One thread stores the results, which frees their stages for the loads; where planes are not
//      whole 16-byte vectors, some warps do. Results that go to padded lines are put together as
//      they lie there, outside the ring, so that one thread stores them too.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fusedconv/device.hpp"
#include "fusedconv/groupnorm.hpp"
#include "fusedconv/support.hpp"

namespace fusedconv::groupnorm {

inline constexpr int kWorkers = 256;  // threads that share a tile
inline constexpr int kWorkerWarps = kWorkers / 32;
inline constexpr int kStageVectors = 4;  // 16-byte vectors of a thread per stage
inline constexpr int kStageBytes = kWorkers * kStageVectors * 16;
inline constexpr int kLineVectors = 128 / 16;  // of a line of the cache
// Of a stage that tensors of one dtype share in so many parts, whole lines.
constexpr int share_bytes(int parts) { return kStageBytes / parts / 128 * 128; }
inline constexpr int kMaxStages = 13;
inline constexpr int kUnitStages = 16;  // units whose statistics a block may have to hold
static_assert(kMaxStages < kUnitStages, "a unit has a stage at least");
inline constexpr int kPolls = 5;  // blocks of which a merging lane reads the words
inline constexpr int kMaxBlocks = 32 * kPolls;
inline constexpr int kMomentsWords = 2;  // that a block publishes of a unit: mean and low, m2
inline constexpr int kSumsWords = 1;

using TableEntry = float2;  // a channel's weight and bias, behind the ring

// Tiles of a unit that a block has at least where teams can be that small, and units that a team
// has then: each begins and ends without overlap.
inline constexpr int kTeamTiles = 4;
inline constexpr int kTeamUnits = 8;

// Two limits on what a warp loads ahead; without them, bursts of stores and loads alternate,
// and tiles of the oldest unit, which everything waits for, come after younger ones. It waits for a
// tile of so many before, whose stage must not be another's by then: a ring has no fewer stages.
inline constexpr int kTilesToShared = 6;  // tiles under way to shared memory
inline constexpr int kTilesToL2 = 1;  // tiles under way to L2, beyond the ring; none of gradients

inline bool activates_before(GroupNormProblem const& p) {
  return p.activation_before != Activation::kIdentity;
}

// What is activated is no value of 16 bits, but behind a ReLU. Of bfloat16 GELU can be in half
// precision, which holds eight times finer values.
inline bool may_be_in_halves(GroupNormProblem const& p) {
  return p.dtype == DType::kBFloat16 && p.activation_before == Activation::kGelu &&
         p.activation_after == Activation::kIdentity;
}
// Else it is kept in float32, in twice the place of what was loaded.
inline bool keeps_floats(GroupNormProblem const& p, bool in_halves) {
  bool const only_relu =
      p.activation_before == Activation::kRelu && p.activation_after == Activation::kIdentity;
  return activates_before(p) && size_of(p.dtype) == 2 && !only_relu && !in_halves;
}

// What a kernel of so many tensors has in shared memory beside ring and table: barriers, units'
// statistics, and of gradients each thread's sums.
constexpr int static_shared_bytes(int tensors) { return tensors == 1 ? 10 << 10 : 6 << 10; }

// Groups of a channels-first tensor, cut into tiles of one run of memory. A group is cut as one
// run, or plane by plane, so that a tile has one channel.
struct Stream {
  unsigned blocks;  // of a team
  unsigned teams;
  int stages;
  int copies;           // of each word, so that not all blocks poll the same lines
  unsigned units;       // groups of all samples
  unsigned tiles;       // of a unit
  unsigned step_units;  // from a block's tile to its next one, those of other teams counted
  unsigned step_tiles;
  unsigned tile_vectors;
  unsigned run_elements;
  unsigned run_vectors;  // that hold a run, at most: it may begin within one
  unsigned run_tiles;
  unsigned vector_shift;  // the logarithm of a vector's elements
  unsigned plane_elements;
  unsigned pace;       // nanoseconds from one tile's store to the next
  unsigned lead_mask;  // tiles are loaded from the vector before that has none of these bits
  int64_t unit_vectors;
  // Whether the tensor's last unit comes first: what has just been written the last may still be in
  // the L2 cache.
  bool from_last;
  // Where tiles are stored as they lie in padded lines, runs are cut there, and tile_vectors and
  // run_vectors count vectors of those lines, which have so many elements; else zero.
  unsigned line_elements;
  unsigned line_vectors;
  unsigned elements_inverse;  // 2^32 divided by either, rounded up
  unsigned vectors_inverse;
};

struct StreamedConfig {
  Support support;
  Stream stream{};
  int64_t words = 0;  // 64-bit words of the blocks' partial results
  int shared_bytes = 0;
  bool in_halves = false;  // what is in front is computed in half precision

  int64_t words_bytes() const { return words * int64_t(sizeof(uint64_t)); }
};

// tensors: 1 where a stage holds a tile of the input; 2 where it holds the input's and the
// gradient's, and a tile has one channel; 3 where the gradient's takes twice the place. aligned:
// addresses are multiples of 16 bytes. fewest_tiles: of a run. in_halves: what is in front is
// computed in half precision.
StreamedConfig stream_config(GroupNormProblem const& problem, int tensors, bool aligned,
                             int64_t fewest_tiles, Device const& device, bool in_halves = false);

// Whether the kernels' code for this compute capability is compiled: PTX of an older one has none.
bool streams_on(int architecture);

}  // namespace fusedconv::groupnorm
