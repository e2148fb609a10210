// The device side of streaming: barriers, bulk copies, words between blocks, the walk.
#pragma once

#include <cstdint>

#include "cuda/async.hpp"
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

// A lane's share of what `count` blocks publish, kWords words each, waited for: of block lane,
// lane + 32, ...
template <int kWords>
struct Words {
  uint64_t values[kPolls][kWords];

  __device__ __forceinline__ bool missing(int i) const {
    bool result = false;
#pragma unroll
    for (uint64_t const value : values[i]) result |= value == kUnpublished;
    return result;
  }

  __device__ __forceinline__ static Words gather(uint64_t const* words, int count) {
    int const lane = threadIdx.x % 32;
    Words result;
#pragma unroll
    for (int i = 0; i < kPolls; ++i) {
#pragma unroll
      for (uint64_t& value : result.values[i]) value = lane + 32 * i < count ? kUnpublished : 0;
    }
    bool missing = true;
    while (missing) {
#pragma unroll
      for (int i = 0; i < kPolls; ++i) {
        if (result.missing(i)) poll(words + kWords * (lane + 32 * i), result.values[i]);
      }
      missing = false;
#pragma unroll
      for (int i = 0; i < kPolls; ++i) missing |= result.missing(i);
    }
    return result;
  }
};

// A block's walk over its chunks.
struct Cursor {
  unsigned unit;
  unsigned chunk;

  __device__ __forceinline__ explicit Cursor(Stream const& s)
      : unit(blockIdx.x / s.chunks), chunk(blockIdx.x % s.chunks) {}
  __device__ __forceinline__ bool valid(Stream const& s) const { return unit < s.units; }
  __device__ __forceinline__ void advance(Stream const& s) {
    unit += s.step_units;
    chunk += s.step_chunks;
    if (chunk >= s.chunks) {
      chunk -= s.chunks;
      ++unit;
    }
  }
};

// A chunk's first vector, counted from the unit's, its size, and its run within the unit.
struct Extent {
  unsigned first;
  unsigned vectors;
  unsigned run;

  __device__ __forceinline__ static Extent of(Stream const& s, unsigned chunk) {
    unsigned const run = chunk / s.run_chunks;
    unsigned const begin = (chunk - run * s.run_chunks) * s.chunk_vectors;
    return {run * s.run_vectors + begin, min(s.chunk_vectors, s.run_vectors - begin), run};
  }
};

// Blocks that hold a part of a unit, and this block's index among them.
__device__ __forceinline__ int participants(Stream const& s) {
  return int(min(s.chunks, s.blocks));
}
__device__ __forceinline__ int participant(Stream const& s, Cursor const& cursor) {
  return int(s.chunks <= s.blocks ? cursor.chunk : blockIdx.x);
}

// Where copy `copy` of a unit's words begins, kWords of each participant.
template <int kWords>
__device__ __forceinline__ int64_t first_word(Stream const& s, int copy, unsigned unit) {
  return (int64_t(copy) * s.units + unit) * participants(s) * kWords;
}

struct Barriers {
  uint64_t full[kMaxSlots];     // a slot's chunk has landed
  uint64_t done[kMaxSlots];     // and its result replaced it
  uint64_t free[kMaxSlots];     // and is stored
  uint64_t taken[kUnitSlots];   // the block's share of a unit is published
  uint64_t merged[kUnitSlots];  // all blocks' shares are known

  // By the threads that wrote a slot's result. Who loads the slot anew waits for each of them, and
  // not only for the store that waited for them: racecheck follows no longer chains.
  __device__ __forceinline__ void finish(int slot) {
    device::fence_async_proxy();
    device::arrive(&free[slot]);
    __syncwarp();
    if (threadIdx.x % 32 == 0) device::arrive(&done[slot]);
  }

  // By all threads, before the block's first barrier.
  __device__ __forceinline__ void init(int slots) {
    int const i = int(threadIdx.x);
    if (i < slots) {
      device::init_barrier(&full[i], 1);
      device::init_barrier(&done[i], kWorkers / 32);
      device::init_barrier(&free[i], kWorkers + 1);
    }
    if (i < kUnitSlots) {
      device::init_barrier(&taken[i], 1);
      device::init_barrier(&merged[i], 1);
    }
    device::fence_async_proxy();
  }
};

// Two limits on what one thread loads ahead; without them, bursts of stores and loads alternate,
// and chunks of the oldest unit, which everything waits for, come after younger ones.
inline constexpr int kLoadsAhead = 6;  // chunks under way to shared memory
inline constexpr int kL2Ahead = 1;     // chunks under way to L2, beyond the ring

// One thread loads chunks: kTensors pieces side by side in a slot.
template <int kTensors>
__device__ __forceinline__ void load_chunks(uint4 const* const (&inputs)[kTensors], Stream const& s,
                                            Barriers& barriers, unsigned char* ring) {
  uint32_t const base = device::shared_address(ring);
  device::RingCursor place;
  device::RingCursor landed;
  int issued = 0;
  Cursor far(s);
  for (int i = 0; i < kL2Ahead; ++i) far.advance(s);
  for (Cursor cursor(s); cursor.valid(s); cursor.advance(s), far.advance(s), ++issued) {
    if (far.valid(s)) {
      Extent const extent = Extent::of(s, far.chunk);
#pragma unroll
      for (int t = 0; t < kTensors; ++t) {
        device::bulk_prefetch(inputs[t] + far.unit * s.unit_vectors + extent.first,
                              extent.vectors * 16);
      }
    }
    if (issued >= s.slots) device::wait(&barriers.free[place.stage], place.parity ^ 1);
    if (issued >= kLoadsAhead) {
      device::wait(&barriers.full[landed.stage], landed.parity);
      landed.advance(s.slots);
    }
    Extent const extent = Extent::of(s, cursor.chunk);
    device::arrive_and_expect(&barriers.full[place.stage], kTensors * extent.vectors * 16);
#pragma unroll
    for (int t = 0; t < kTensors; ++t) {
      device::bulk_load(base + place.stage * kSlotBytes + t * (kSlotBytes / kTensors),
                        inputs[t] + cursor.unit * s.unit_vectors + extent.first,
                        extent.vectors * 16, &barriers.full[place.stage]);
    }
    place.advance(s.slots);
  }
}

// One thread stores the slots' first pieces, no faster than DRAM takes them: stores in bursts delay
// the loads that the next unit waits for.
__device__ __forceinline__ void store_chunks(uint4* output, Stream const& s, Barriers& barriers,
                                             unsigned char* ring) {
  uint32_t const base = device::shared_address(ring);
  device::RingCursor place;
  int previous = -1;
  uint64_t latest = 0;
  for (Cursor cursor(s); cursor.valid(s); cursor.advance(s), place.advance(s.slots)) {
    device::wait(&barriers.done[place.stage], place.parity);
    while (nanoseconds() - latest < s.pace) {
    }
    latest = nanoseconds();
    Extent const extent = Extent::of(s, cursor.chunk);
    device::bulk_store(output + cursor.unit * s.unit_vectors + extent.first,
                       base + place.stage * kSlotBytes, extent.vectors * 16);
    // A slot is free once its store has read it.
    if (previous >= 0) {
      device::wait_stores_read<1>();
      device::arrive(&barriers.free[previous]);
    }
    previous = place.stage;
  }
  device::wait_stores_read<0>();
}

}  // namespace fusedconv::groupnorm::device_stream
