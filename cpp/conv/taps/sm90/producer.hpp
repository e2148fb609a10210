// The warps that stage the input, channels innermost, and the one that copies the filter.
#pragma once

#include <cstdint>

#include "conv/taps/sm90/params.hpp"
#include "conv/taps/sm90/traits.hpp"
#include "cuda/async.hpp"
#include "cuda/math.hpp"

namespace fusedconv::conv::taps::sm90 {

struct Barriers {
  uint64_t full_box[kMostStages], empty_box[kMostStages];
  uint64_t full_slot[kMostSlots], empty_slot[kMostSlots];
};
static_assert(sizeof(Barriers) <= Memory::kBarrierBytes);

inline constexpr int kOutside = -1;
inline constexpr int kLoadBarrier = 1;      // of the loading warps
inline constexpr int kConsumerBarrier = 2;  // and the next: of a consumer's warps

// Of each staged position, where its pixel is in the input: elements from the first sample's first
// of the convolution group's channels, or kOutside.
__device__ __forceinline__ void locate_inputs(Params const& p, Place const& place, int thread,
                                              int* inputs) {
  int const pixel_stride = p.channels_last ? p.channels * (p.blocks / p.blocks_m.divisor) : 1;
  int const sample_stride = p.channels * (p.blocks / p.blocks_m.divisor) * p.plane.divisor;
  for (int at = thread; at < p.positions; at += kLoadThreads) {
    int result = kOutside;
    if (p.order == Order::kLine) {
      int const index = place.first + at;
      if (index < place.pixels) {
        int sample, pixel;
        p.plane(sample, pixel, index);
        result = sample * sample_stride + pixel * pixel_stride;
      }
    } else {
      int const rest = at / p.box[2];
      int const w = place.origin[2] + p.axes[2].lowest - p.lead + at - rest * p.box[2];
      int d, h;
      p.box_h(d, h, rest);
      h += place.origin[1] + p.axes[1].lowest;
      d += place.origin[0] + p.axes[0].lowest;
      auto const inside = [&](int axis, int position) {
        return unsigned(position) < unsigned(p.axes[axis].problem.input);
      };
      if (inside(0, d) && inside(1, h) && inside(2, w)) {
        result = ((d * p.axes[1].problem.input + h) * p.axes[2].problem.input + w) * pixel_stride;
      }
    }
    inputs[at] = result;
  }
}

// A lane's share of a stage: units of 16 bytes of channels by one position, or by two neighbours
// (kPlanes). Several are on their way at once.
template <class Traits, Loads kLoads>
struct Unit {
  using T = typename Traits::Element;
  static constexpr int kVector = Traits::kVector;
  static constexpr bool kPairs = kLoads == Loads::kPlanes;
  static constexpr int kWords = kLoads == Loads::kChannels ? 4 : kVector;
  static constexpr int kBatch = 32 / kWords;

  uint32_t words[kWords];

  // channels: how many there are from the first on, none for positions outside; whole: these are
  // none or all.
  __device__ __forceinline__ void load(T const* source, int64_t channel_stride, int channels,
                                       bool whole) {
    if constexpr (kLoads == Loads::kChannels) {
      asm volatile(
          "{\n"
          ".reg .pred p;\n"
          "setp.gt.s32 p, %5, 0;\n"
          "mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;\n"
          "@p ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n"
          "}"
          : "=&r"(words[0]), "=&r"(words[1]), "=&r"(words[2]), "=&r"(words[3])
          : "l"(source), "r"(channels));
    } else if (whole) {
      bool const inside = channels > 0;
#pragma unroll
      for (int c = 0; c < kVector; ++c, source += channel_stride) load_word(c, source, inside);
    } else {
#pragma unroll
      for (int c = 0; c < kVector; ++c, source += channel_stride) {
        load_word(c, source, c < channels);
      }
    }
  }

  // The 16 bytes of the unit's first or second position; which, a lane may choose.
  __device__ __forceinline__ uint4 piece(int position) const {
    uint32_t result[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kLoads == Loads::kChannels || sizeof(T) == 4) {
        result[i] = words[i];
      } else {
        result[i] = __byte_perm(words[2 * i], words[2 * i + 1], position == 0 ? 0x5410 : 0x7632);
      }
      if constexpr (Traits::kRounds) {
        result[i] = __float_as_uint(device::round_to_tf32(__uint_as_float(result[i])));
      }
    }
    return {result[0], result[1], result[2], result[3]};
  }

 private:
  // By a predicate: behind branches the loads would wait for one another.
  __device__ __forceinline__ void load_word(int c, T const* source, bool inside) {
    if constexpr (kPairs || sizeof(T) == 4) {
      asm volatile(
          "{\n"
          ".reg .pred p;\n"
          "setp.ne.b32 p, %2, 0;\n"
          "mov.b32 %0, 0;\n"
          "@p ld.global.b32 %0, [%1];\n"
          "}"
          : "=&r"(words[c])
          : "l"(source), "r"(int(inside)));
    } else {
      asm volatile(
          "{\n"
          ".reg .pred p;\n"
          ".reg .b16 h;\n"
          "setp.ne.b32 p, %2, 0;\n"
          "mov.b16 h, 0;\n"
          "@p ld.global.b16 h, [%1];\n"
          "cvt.u32.u16 %0, h;\n"
          "}"
          : "=&r"(words[c])
          : "l"(source), "r"(int(inside)));
    }
  }
};

template <class Traits>
__device__ __forceinline__ void put(unsigned char* target, uint4 value, int part_bytes) {
  if constexpr (Traits::kSplits) {
    auto const small = [](uint32_t& word) {
      float const whole = __uint_as_float(word);
      float const big = device::big_tf32(whole);
      word = __float_as_uint(big);
      return __float_as_uint(whole - big);
    };
    uint4 rest;
    rest.x = small(value.x);
    rest.y = small(value.y);
    rest.z = small(value.z);
    rest.w = small(value.w);
    *reinterpret_cast<uint4*>(target + part_bytes) = rest;
  }
  *reinterpret_cast<uint4*>(target) = value;
}

template <class Traits, Loads kLoads>
__device__ __forceinline__ void stage_inputs(Params const& p, Barriers& barriers,
                                             unsigned char* shared, int warp) {
  using T = typename Traits::Element;
  using U = Unit<Traits, kLoads>;
  constexpr int kVector = Traits::kVector;
  int const lane = threadIdx.x % 32, thread = warp * 32 + lane;
  int const columns = Traits::kColumns * (p.shares_rows ? kConsumers : 1);
  int64_t const plane = p.plane.divisor;
  int const all_channels = p.channels * (p.blocks / p.blocks_m.divisor);
  int64_t const channel_stride = p.channels_last ? 1 : plane;
  // Lanes run along positions, or channels last along the pieces of a position first.
  constexpr bool kAcross = kLoads == Loads::kChannels;
  int const shift = p.pieces == 8 ? 3 : p.pieces == 4 ? 2 : 1;
  int const step = kAcross ? 32 >> shift : U::kPairs ? 64 : 32;  // positions of a warp's units
  int const runs = (p.positions + step - 1) / step;
  int const units = kAcross ? runs : runs << shift;
  int const part_bytes = p.positions * p.pieces * 16;
  bool const whole = p.channels % kVector == 0;
  Share const share(p, Traits::kSplitsChannels);
  int const own = kAcross ? lane >> shift : U::kPairs ? 2 * lane : lane;
  device::RingCursor cursor;
  int* inputs = reinterpret_cast<int*>(shared + p.memory.inputs);
  int set = 0;
  for (Items item(p); item.present(); item.advance()) {
    Place const place(p, item, columns);
    Stream const stream(p, place.block_m, Traits::kRowGroups);
    if (stream.total == 0) continue;
    int* const table = inputs + set * p.positions;
    set ^= 1;
    locate_inputs(p, place, thread, table);
    device::sync_threads(kLoadBarrier, kLoadThreads);
    T const* const base = static_cast<T const*>(p.input) +
                          int64_t(place.sample) * all_channels * plane +
                          place.group * p.channels * channel_stride;
    for (int chunk = share.first; chunk < share.end; ++chunk) {
      int const channel0 = chunk * p.pieces * kVector;
      unsigned char* const box = shared + p.memory.boxes + cursor.stage * p.memory.box_bytes;
      bool waited = false;
#pragma unroll 1
      for (int first = warp; first < units || !waited; first += kLoadWarps * U::kBatch) {
        U batch[U::kBatch];
#pragma unroll
        for (int i = 0; i < U::kBatch; ++i) {
          int const unit = first + i * kLoadWarps;
          int const run = kAcross ? unit : unit >> shift;
          int const piece = (kAcross ? lane : unit) & (p.pieces - 1);
          int const at = run * step + own;
          int const offset = unit < units && at < p.positions ? table[at] : kOutside;
          int const channel = channel0 + piece * kVector;
          batch[i].load(base + offset + channel * channel_stride, channel_stride,
                        offset != kOutside ? p.channels - channel : 0, whole);
        }
        if (!waited) {
          device::wait(&barriers.empty_box[cursor.stage], cursor.parity ^ 1);
          waited = true;
        }
#pragma unroll
        for (int i = 0; i < U::kBatch; ++i) {
          int const unit = first + i * kLoadWarps;
          int const run = kAcross ? unit : unit >> shift;
          int const piece = (kAcross ? lane : unit) & (p.pieces - 1);
          int const at = run * step + own;
          if (unit >= units) break;
          unsigned char* const target = box + (piece * p.positions + at) * 16;
#pragma unroll
          for (int pass = 0; pass < (U::kPairs ? 2 : 1); ++pass) {
            // Lanes begin with different positions of their pairs, for the sake of banks.
            int const position = U::kPairs ? pass ^ (lane >> 2 & 1) : 0;
            if (at + position < p.positions) {
              put<Traits>(target + position * 16, batch[i].piece(position), part_bytes);
            }
          }
        }
      }
      device::fence_async_proxy();
      __syncwarp();
      if (lane == 0) device::arrive(&barriers.full_box[cursor.stage]);
      cursor.advance(p.stages);
    }
  }
}

// By one thread.
template <class Traits>
__device__ __forceinline__ void copy_filter(Params const& p, Barriers& barriers, uint32_t shared) {
  int const columns = Traits::kColumns * (p.shares_rows ? kConsumers : 1);
  device::RingCursor cursors[kConsumers];
  Share const share(p, Traits::kSplitsChannels);
  for (Items item(p); item.present(); item.advance()) {
    Place const place(p, item, columns);
    Stream const stream(p, place.block_m, Traits::kRowGroups);
    unsigned char const* source = p.filter + (int64_t(item.block) * p.chunks + share.first) *
                                                 p.block_taps * p.memory.slot_bytes;
    for (int chunk = share.first; chunk < share.end; ++chunk) {
      for (int i = 0; i < stream.total; ++i) {
        int const consumer = stream.consumer_of(p, i);
        device::RingCursor& cursor = cursors[consumer];
        int const slot = consumer * p.slots + cursor.stage;
        device::wait(&barriers.empty_slot[slot], cursor.parity ^ 1);
        device::arrive_and_expect(&barriers.full_slot[slot], p.memory.slot_bytes);
        device::bulk_load(shared + p.memory.filter + slot * p.memory.slot_bytes,
                          source + int64_t(i) * p.memory.slot_bytes, p.memory.slot_bytes,
                          &barriers.full_slot[slot]);
        cursor.advance(p.slots);
      }
      source += int64_t(p.block_taps) * p.memory.slot_bytes;
    }
  }
}

}  // namespace fusedconv::conv::taps::sm90
