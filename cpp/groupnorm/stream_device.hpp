// The device side of streaming: words between blocks, the walk over tiles, loads and stores.
#pragma once

#include <cstdint>

#include "cuda/async.hpp"
#include "fusedconv/check.hpp"
#include "groupnorm/affine.hpp"
#include "groupnorm/stream.hpp"

namespace fusedconv::groupnorm::device_stream {

inline constexpr uint64_t kUnpublished = ~uint64_t(0);  // two NaNs that arithmetic does not produce

__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t result;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(result));
  return result;
}

// A word holds two floats and is its own flag: nothing else needs to become visible with it.
__device__ __forceinline__ void publish(uint64_t* word, float a, float b) {
  uint32_t const low = a == a ? __float_as_uint(a) : 0x7fffffffu;
  uint64_t const value = uint64_t(__float_as_uint(b)) << 32 | low;
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// Each of the words by itself: which of them are there does not matter to the others.
__device__ __forceinline__ void poll(uint64_t const* words, uint64_t (&values)[1]) {
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(values[0]) : "l"(words) : "memory");
}
__device__ __forceinline__ void poll(uint64_t const* words, uint64_t (&values)[2]) {
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(values[0]), "=l"(values[1])
               : "l"(words)
               : "memory");
}

__device__ __forceinline__ float2 unpacked(uint64_t word) {
  return make_float2(__uint_as_float(uint32_t(word)), __uint_as_float(uint32_t(word >> 32)));
}

// Nanoseconds until a warp asks again: all blocks ask for the same lines, and words that are stored
// there meanwhile arrive the later for it.
inline constexpr unsigned kBetweenAsking = 400;

// A lane's share of what `count` blocks publish, kWords words each: of block lane, lane + 32, ...
template <int kWords>
struct Words {
  uint64_t values[kPolls][kWords];

  __device__ __forceinline__ bool missing(int i) const {
    bool result = false;
#pragma unroll
    for (uint64_t const value : values[i]) result |= value == kUnpublished;
    return result;
  }

  // Asks once. What comes is not waited for here.
  __device__ __forceinline__ void ask(uint64_t const* words, int count) {
    int const lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kPolls; ++i) {
#pragma unroll
      for (uint64_t& value : values[i]) value = 0;
      if (lane + 32 * i < count) poll(words + kWords * (lane + 32 * i), values[i]);
    }
  }
  // Asks again for what was not there, until all is.
  __device__ __forceinline__ void complete(uint64_t const* words) {
    int const lane = threadIdx.x % 32;
    while (true) {
      bool is_missing = false;
#pragma unroll
      for (int i = 0; i < kPolls; ++i) is_missing |= missing(i);
      if (!__any_sync(~0u, is_missing)) break;
      __nanosleep(kBetweenAsking);
#pragma unroll
      for (int i = 0; i < kPolls; ++i) {
        if (missing(i)) poll(words + kWords * (lane + 32 * i), values[i]);
      }
    }
    __syncwarp();
  }
  __device__ __forceinline__ static Words gather(uint64_t const* words, int count) {
    Words result;
    result.ask(words, count);
    result.complete(words);
    return result;
  }
};

// This block's team, and its place in it.
__device__ __forceinline__ unsigned team(Stream const& s) { return blockIdx.x % s.teams; }
__device__ __forceinline__ unsigned member(Stream const& s) { return blockIdx.x / s.teams; }

// A block's walk over its tiles.
struct Walk {
  unsigned unit;
  unsigned tile;

  __device__ __forceinline__ explicit Walk(Stream const& s)
      : unit(member(s) / s.tiles * s.teams + team(s)), tile(member(s) % s.tiles) {}
  __device__ __forceinline__ bool valid(Stream const& s) const { return unit < s.units; }
  __device__ __forceinline__ void advance(Stream const& s) {
    unit += s.step_units;
    tile += s.step_tiles;
    if (tile >= s.tiles) {
      tile -= s.tiles;
      unit += s.teams;
    }
  }
};

// A tile's first vector, counted from the unit's, its size, and its run within the unit.
struct Extent {
  unsigned first;
  unsigned vectors;
  unsigned run;
  int element;      // of the run that the first vector begins with, below zero if it begins before
  unsigned skip;    // elements of the first vector before the tile's
  unsigned count;   // the tile's elements
  unsigned column;  // of the tile's first element, in its line

  __device__ __forceinline__ static Extent of(Stream const& s, unsigned tile) {
    unsigned const run = tile / s.run_tiles;
    unsigned const begin = (tile - run * s.run_tiles) * s.tile_vectors;
    unsigned const run_begin = run * s.run_elements;
    unsigned const run_first = run_begin >> s.vector_shift;
    unsigned const skew = run_begin - (run_first << s.vector_shift);
    unsigned const run_last = run_begin + s.run_elements - 1 >> s.vector_shift;
    unsigned const vectors = min(s.tile_vectors, run_last - run_first + 1 - begin);
    int const element = int(begin << s.vector_shift) - int(skew);
    unsigned const skip = unsigned(max(-element, 0));
    int const end = min(element + int(vectors << s.vector_shift), int(s.run_elements));
    return {run_first + begin, vectors, run, element, skip, unsigned(end - element) - skip, 0};
  }

  // The same where runs are cut as they lie in padded lines.
  __device__ __forceinline__ static Extent of_lines(Stream const& s, unsigned tile) {
    unsigned const run = tile / s.run_tiles;
    unsigned const begin = (tile - run * s.run_tiles) * s.tile_vectors;
    unsigned const end = min(begin + s.tile_vectors, s.run_vectors);
    auto const dense = [&](unsigned vector, unsigned& column) {
      unsigned const line = __umulhi(vector, s.vectors_inverse);
      column = vector - line * s.line_vectors << s.vector_shift;
      return line * s.line_elements + column;
    };
    unsigned column, end_column;
    unsigned const last = dense(end, end_column) - 1;
    unsigned const element = dense(begin, column);
    unsigned const run_begin = run * s.run_elements;
    unsigned const first = run_begin + element >> s.vector_shift;
    unsigned const skip = run_begin + element - (first << s.vector_shift);
    return {first, (run_begin + last >> s.vector_shift) - first + 1,
            run,   int(element - skip),
            skip,  last + 1 - element,
            column};
  }

  // Whether the e-th element of the tile's i-th vector is the tile's.
  __device__ __forceinline__ bool has(Stream const& s, int i, int e) const {
    return unsigned((i << s.vector_shift) + e) - skip < count;
  }
};

// Where in the tensor a walk's unit lies.
__device__ __forceinline__ unsigned unit_in_tensor(Stream const& s, unsigned unit) {
  return s.from_last ? s.units - 1 - unit : unit;
}
__device__ __forceinline__ int64_t first_vector(Stream const& s, unsigned unit) {
  return unit_in_tensor(s, unit) * s.unit_vectors;
}

// Blocks of a team that hold a part of a unit, and this block's index among them.
__device__ __forceinline__ int participants(Stream const& s) { return int(min(s.tiles, s.blocks)); }
__device__ __forceinline__ int participant(Stream const& s, unsigned tile) {
  return int(s.tiles <= s.blocks ? tile : member(s));
}

// How many tiles a walk has.
__device__ __forceinline__ int64_t tiles_of_block(Stream const& s) {
  unsigned const units = (s.units - team(s) + s.teams - 1) / s.teams;  // there are no fewer
  return (int64_t(units) * s.tiles - member(s) + s.blocks - 1) / s.blocks;
}

// Where copy `copy` of a unit's words begins, kWords of each participant.
template <int kWords>
__device__ __forceinline__ int64_t first_word(Stream const& s, int copy, unsigned unit) {
  return (int64_t(copy) * s.units + unit) * participants(s) * kWords;
}

// As device::wait(), by threads that share their multiprocessor's issue slots with others at work,
// and are not the only ones of their kind under way: asking again and again was a third of all
// instructions executed.
__device__ __forceinline__ void wait_asleep(uint64_t* barrier, uint32_t parity) {
  constexpr unsigned kNanoseconds = 100;
  while (!device::has_ended(barrier, parity)) __nanosleep(kNanoseconds);
}

struct Barriers {
  uint64_t full[kMaxStages];     // a stage's tile has landed
  uint64_t done[kMaxStages];     // and its result replaced it
  uint64_t free[kMaxStages];     // and is stored
  uint64_t taken[kUnitStages];   // the block's share of a unit is published
  uint64_t merged[kUnitStages];  // all blocks' shares are known

  // By the threads that wrote a stage's result. Who reads the stage next waits for each of them:
  // racecheck follows neither longer chains nor a warp's own order. That is the thread that loads
  // it anew where bulk copies store it, and warps where those do.
  __device__ __forceinline__ void finish(int stage, bool is_for_warps) {
    device::fence_async_proxy();
    if (is_for_warps) {
      device::arrive(&done[stage]);
      return;
    }
    device::arrive(&free[stage]);
    __syncwarp();
    if (threadIdx.x % 32 == 0) device::arrive(&done[stage]);
  }

  // By all threads, before the block's first barrier. readers: threads that free a stage, beside
  // those that store it and those above, of which there are so many workers for a tile.
  __device__ __forceinline__ void init(int stages, bool is_for_warps, int readers,
                                       int workers = kWorkers) {
    int const i = int(threadIdx.x);
    if (i < stages) {
      device::init_barrier(&full[i], 1);
      device::init_barrier(&done[i], is_for_warps ? workers : workers / 32);
      device::init_barrier(&free[i], readers + (is_for_warps ? 32 : workers + 1));
    }
    if (i < kUnitStages) {
      device::init_barrier(&taken[i], 1);
      device::init_barrier(&merged[i], 1);
    }
    device::fence_async_proxy();
  }
};

// Vectors before a tile's first that are loaded with it.
__device__ __forceinline__ unsigned lead_of(Stream const& s, Walk const& walk,
                                            Extent const& extent) {
  return unsigned(first_vector(s, walk.unit) + extent.first) & s.lead_mask;
}

// A warp's walk over its block's tiles, one of which each lane has at a time: what a tile takes to
// find out, they do for 32 at once, where a thread alone took longer than all that is done with
// one.
class LaneWalk {
 public:
  __device__ __forceinline__ explicit LaneWalk(Stream const& s)
      : walk_(s), left_(int(tiles_of_block(s))) {
    for (int i = int(threadIdx.x) % 32; i > 0; --i) walk_.advance(s);
  }
  // The tiles of the lanes that there are.
  __device__ __forceinline__ int count() const { return min(left_, 32); }
  __device__ __forceinline__ Walk const& tile() const { return walk_; }
  __device__ __forceinline__ void advance(Stream const& s) {
    left_ -= 32;
    for (int i = 0; i < 32; ++i) walk_.advance(s);
  }

 private:
  Walk walk_;
  int left_;
};

// Of the units that a block has tiles of: which of them a lane's tile is of, and whether it is the
// last of that.
class LaneUnits {
 public:
  unsigned ordinal;
  bool is_last;

  __device__ __forceinline__ void take(Stream const& s, Walk const& tile) {
    int const lane = int(threadIdx.x) % 32;
    unsigned const before = __shfl_up_sync(~0u, tile.unit, 1);
    unsigned const begun = __ballot_sync(~0u, tile.unit != (lane == 0 ? latest_ : before));
    ordinal = begun_ + __popc(begun << (31 - lane));
    begun_ += __popc(begun);
    latest_ = __shfl_sync(~0u, tile.unit, 31);
    Walk next = tile;
    next.advance(s);
    is_last = next.unit != tile.unit;
  }

 private:
  unsigned latest_ = ~0u;
  unsigned begun_ = ~0u;
};

// A warp loads tiles: kTensors tensors' shares side by side in a stage, of what extent_of(tile)
// says, the last tensor's of elements kWide times as long. places[stage] is where describe(walk,
// extent, units) is left, for who waits for the tile.
template <int kTensors, int kWide = 1, class Place, class ExtentOf, class Describe>
__device__ __forceinline__ void load_tiles(uint4 const* const (&inputs)[kTensors], Stream const& s,
                                           Barriers& barriers, unsigned char* ring, Place* places,
                                           ExtentOf const& extent_of, Describe const& describe) {
  static_assert(kTilesToL2 == 1, "the tile after the one that is loaded, if a lane has it");
  constexpr int kParts = kTensors - 1 + kWide;
  uint32_t const base = device::shared_address(ring);
  int const lane = int(threadIdx.x) % 32;
  device::RingCursor cursor;
  device::RingCursor landed;
  LaneUnits units;
  int issued = 0;
  for (LaneWalk walk(s); walk.count() > 0; walk.advance(s)) {
    units.take(s, walk.tile());
    Extent extent{};
    Place place{};
    if (lane < walk.count()) {
      extent = extent_of(walk.tile().tile);
      place = describe(walk.tile(), extent, units);
    }
    unsigned const lead = lead_of(s, walk.tile(), extent);
    int64_t const first = first_vector(s, walk.tile().unit) + extent.first - lead;
    uint32_t const bytes = (lead + extent.vectors) * 16;
    for (int turn = 0; turn < walk.count(); ++turn, ++issued) {
      if (kTensors == 1 && lane == turn + 1 && lane < walk.count()) {
        device::bulk_prefetch(inputs[0] + first, bytes);
      }
      if (lane == turn) {
        if (issued >= s.stages) device::wait(&barriers.free[cursor.stage], cursor.parity ^ 1);
        if (issued >= kTilesToShared) device::wait(&barriers.full[landed.stage], landed.parity);
        places[cursor.stage] = place;
        device::arrive_and_expect(&barriers.full[cursor.stage], kParts * bytes);
#pragma unroll
        for (int t = 0; t < kTensors; ++t) {
          int const wide = t == kTensors - 1 ? kWide : 1;
          device::bulk_load(base + cursor.stage * kStageBytes + t * share_bytes(kParts),
                            inputs[t] + wide * first, wide * bytes, &barriers.full[cursor.stage]);
        }
      }
      __syncwarp();
      if (issued >= kTilesToShared) landed.advance(s.stages);
      cursor.advance(s.stages);
    }
  }
}

// One thread stores the stages' first shares, no faster than DRAM takes them: stores in bursts
// delay the loads that the next unit waits for.
__device__ __forceinline__ void store_tiles(uint4* output, Stream const& s, Barriers& barriers,
                                            unsigned char* ring) {
  uint32_t const base = device::shared_address(ring);
  device::RingCursor cursor;
  uint64_t latest = 0;
  for (Walk walk(s); walk.valid(s); walk.advance(s), cursor.advance(s.stages)) {
    device::wait(&barriers.done[cursor.stage], cursor.parity);
    while (nanoseconds() - latest < s.pace) {
    }
    latest = nanoseconds();
    Extent const extent = Extent::of(s, walk.tile);
    device::bulk_store(output + first_vector(s, walk.unit) + extent.first,
                       base + cursor.stage * kStageBytes + lead_of(s, walk, extent) * 16,
                       extent.vectors * 16);
    // A stage is free once its store has read it, which takes less time than the pace gives.
    device::wait_stores_read();
    device::arrive(&barriers.free[cursor.stage]);
  }
}

// Weights and biases of all channels, for the block's kThreads threads to share. The barrier is for
// racecheck, which follows an initialisation that none of a warp's lanes performs to the address
// that a register has from here.
template <int kThreads>
__device__ __forceinline__ TableEntry* fill_table(Affine const& affine, unsigned char* shared) {
  auto* const table = reinterpret_cast<TableEntry*>(shared);
  for (int c = threadIdx.x; c < affine.channels; c += kThreads) {
    table[c] = make_float2(weight_of(affine, c), bias_of(affine, c));
  }
  __syncthreads();
  return table;
}

// Cooperative, so that every block is resident: they wait for each other.
template <class... Parameters>
void launch(char const* name, void (*kernel)(Parameters...), int threads,
            StreamedConfig const& config, void** arguments, cudaStream_t stream) {
  FUSEDCONV_CUDA(name, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            config.shared_bytes));
  FUSEDCONV_CUDA(
      name, cudaLaunchCooperativeKernel(kernel, dim3(config.stream.blocks * config.stream.teams),
                                        dim3(threads), arguments, config.shared_bytes, stream));
}

}  // namespace fusedconv::groupnorm::device_stream
