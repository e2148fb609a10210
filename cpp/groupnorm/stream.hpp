// Streaming: all multiprocessors together hold a few groups in shared memory, so that each element
// is read from DRAM once. One block per multiprocessor; the tensor is a sequence of chunks, dealt
// to the blocks in turn; a block's ring of slots holds its next chunks.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "fusedconv/groupnorm.hpp"
#include "fusedconv/types.hpp"

namespace fusedconv::groupnorm {

inline constexpr int kWorkers = 256;    // threads that share a chunk
inline constexpr int kSlotVectors = 4;  // 16-byte vectors of a thread per slot
inline constexpr int kSlotBytes = kWorkers * kSlotVectors * 16;
inline constexpr int kMaxSlots = 13;
inline constexpr int kUnitSlots = 16;  // units whose statistics a block may have to hold
inline constexpr int kPolls = 5;       // blocks of which a merging lane reads the words
inline constexpr int kMaxBlocks = 32 * kPolls;
inline constexpr int kMomentsWords = 2;  // that a block publishes of a unit: mean and low, m2
inline constexpr int kSumsWords = 1;

// Groups of a channels-first tensor, cut into chunks of one run of memory. A group is cut as one
// run, or plane by plane, so that a chunk has one channel.
struct Stream {
  unsigned blocks;
  int slots;
  int copies;           // of each word, so that not all blocks poll the same lines
  unsigned units;       // groups of all samples
  unsigned chunks;      // of a unit
  unsigned step_units;  // from a block's chunk to its next one
  unsigned step_chunks;
  unsigned chunk_vectors;
  unsigned run_vectors;
  unsigned run_chunks;
  unsigned plane_vectors;
  unsigned pace;  // nanoseconds from one chunk's store to the next
  int64_t unit_vectors;
};

struct StreamPlan {
  std::string obstacle;  // why streaming does not serve the problem; empty where it does
  Stream stream{};
  int64_t words = 0;  // 64-bit words of the blocks' partial results
  int shared_bytes = 0;
};

// tensors: 1 where a slot holds a chunk of the input; 2 where it holds the input's and the
// gradient's, and a chunk has one channel. aligned: addresses are multiples of 16 bytes.
// device must be current; -1 stands for a device that is not there.
StreamPlan plan_stream(GroupNormProblem const& problem, int tensors, bool aligned, int device);

}  // namespace fusedconv::groupnorm
