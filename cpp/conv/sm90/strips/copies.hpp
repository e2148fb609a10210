// Warps that fill the ring: one has lines brought by tensor copies, the others make the copies of
// each that its later taps read.
#pragma once

#include <cstdint>

#include "conv/sm90/strips/params.hpp"
#include "conv/sm90/strips/traits.hpp"
#include "conv/sm90/wait.hpp"
#include "cuda/async.hpp"
#include "cuda/store_shared.hpp"
#include "cute/arch/copy_sm90_desc.hpp"
#include "cute/arch/copy_sm90_tma.hpp"

namespace fusedconv::conv::sm90::strips {

// By one thread. What lies outside the image is zeros.
template <Reach kReach>
__device__ __forceinline__ void bring_lines(Params const& p, Maps const& maps, Block const& block,
                                            Barriers& barriers, unsigned char* shared) {
  constexpr auto kHint = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  int const column = block.strip * kPositions - kReach.lead();
  uint32_t n = 0;
  for (Segments segment(p, block); segment.advance(p);) {
    int const last = segment.first + segment.lines + kTaps - 1 - p.lower_h;
#pragma unroll 1
    for (int line = segment.first - p.lower_h; line < last; ++line, ++n) {
      Slot const slot(n);
      uint64_t* const brought = &barriers.brought[slot.stage];
      wait_for(&barriers.read[slot.stage], slot.parity ^ 1);
      device::arrive_and_expect(brought, kCopyBytes + kReach.tail_bytes());
      cute::SM90_TMA_LOAD_5D::copy(&maps.lines, brought, kHint, shared + slot.stage * kLineBytes,
                                   column, line, 0, segment.sample, 0);
      cute::SM90_TMA_LOAD_5D::copy(&maps.tails, brought, kHint,
                                   shared + kReach.tails_at() + slot.stage * kReach.tail_bytes(),
                                   column + kPositions, line, 0, segment.sample, 0);
    }
  }
}

// The upper half of a word and the lower half of the one behind it.
__device__ __forceinline__ uint32_t between(uint32_t word, uint32_t behind) {
  return __funnelshift_r(word, behind, 16);
}

// A lane's part of making copies. A warp takes four channels at a time, eight lanes the vectors of
// one, which are 128 bytes of shared memory side by side. The lane finds out once where its first
// vectors lie; in its later turns they lie kTurnChannels further each.
template <Reach kReach>
class LineCopies {
 public:
  // shared: where the ring begins.
  __device__ __forceinline__ LineCopies(uint32_t shared, int warp, int lane)
      : turns_((kChannels / kOwnChannels - warp + kCopyWarps - 1) / kCopyWarps) {
    int const unit = lane % kUnits, channel = warp * kOwnChannels + lane / kUnits;
    uint32_t const start = shared + channel * kPitch;
    own_ = start + (unit ^ channel % 8) * kVectorBytes;
#pragma unroll
    for (int i = 0; i < kBehind; ++i) {
      int const behind = unit + 1 + i, tail = behind - kUnits;
      is_tail_[i] = tail >= 0;
      behind_[i] = is_tail_[i] ? shared + kReach.tails_at() +
                                     (channel * kReach.tails() + tail) * kVectorBytes
                               : start + (behind ^ channel % 8) * kVectorBytes;
    }
  }

  __device__ __forceinline__ void make(int stage) const {
    uint32_t const line = stage * kLineBytes, tails = stage * kReach.tail_bytes();
#pragma unroll 2
    for (int turn = 0; turn < turns_; ++turn) {
      make(turn % 2, line + turn * kTurnChannels * kPitch,
           tails + turn * kTurnChannels * kReach.tails() * kVectorBytes);
    }
  }

 private:
  static constexpr int kUnits = kPositions / kGranule;  // vectors of a channel's line
  static constexpr int kOwnChannels = 32 / kUnits;      // of a warp at a time
  static constexpr int kTurnChannels = kCopyWarps * kOwnChannels;
  static constexpr int kBehind = kReach.before == 1 ? 2 : 1;  // vectors that are read behind
  // Every other turn's channels are four behind a multiple of eight, by which a swizzle has half of
  // a channel's vectors change places.
  static_assert(kTurnChannels % 8 == 4 && kUnits == 8);
  static constexpr uint32_t kOdd = 4 * kVectorBytes;

  // line, tails: from the first stage's first turn.
  __device__ __forceinline__ void make(int odd, uint32_t line, uint32_t tails) const {
    uint32_t const own = (own_ ^ odd * kOdd) + line;
    uint32_t behind[kBehind];
#pragma unroll
    for (int i = 0; i < kBehind; ++i) {
      behind[i] = is_tail_[i] ? behind_[i] + tails : (behind_[i] ^ odd * kOdd) + line;
    }
    if constexpr (kReach.lead() == 0) {
      // The first copy is what was brought.
      uint4 const v = device::load_vector(own);
      uint32_t const next = device::load_word(behind[0]);
      device::store_shared(own + kCopyBytes, make_uint4(between(v.x, v.y), between(v.y, v.z),
                                                        between(v.z, v.w), between(v.w, next)));
      device::store_shared(own + 2 * kCopyBytes, make_uint4(v.y, v.z, v.w, next));
    } else {
      // The first position that is read is one or two in front of the lead's end: the first copy
      // takes the place of what was brought. A warp has all of its channels' vectors, and reads
      // them before it stores any.
      uint32_t const before = device::load_word(own + 12);
      uint4 const v = device::load_vector(behind[0]);
      uint32_t last = 0;
      if constexpr (kBehind > 1) last = device::load_word(behind[1]);
      __syncwarp();
      uint4 const half = {between(before, v.x), between(v.x, v.y), between(v.y, v.z),
                          between(v.z, v.w)};
      if constexpr (kReach.before == 2) {
        device::store_shared(own, make_uint4(before, v.x, v.y, v.z));
        device::store_shared(own + kCopyBytes, half);
        device::store_shared(own + 2 * kCopyBytes, v);
      } else {
        device::store_shared(own, half);
        device::store_shared(own + kCopyBytes, v);
        device::store_shared(own + 2 * kCopyBytes,
                             make_uint4(half.y, half.z, half.w, between(v.w, last)));
      }
    }
  }

  int turns_;
  // In the first stage's first turn: the lane's vector, and those behind it.
  uint32_t own_, behind_[kBehind];
  bool is_tail_[kBehind];
};

// By a warp.
template <Reach kReach>
__device__ __forceinline__ void make_copies(Params const& p, Block const& block, Barriers& barriers,
                                            uint32_t shared, int warp) {
  int const lane = int(threadIdx.x % 32u);
  LineCopies<kReach> const copies(shared, warp, lane);
  uint32_t lines = 0;
#pragma unroll 1
  for (Segments segment(p, block); segment.advance(p);) lines += segment.lines + kTaps - 1;
#pragma unroll 1
  for (uint32_t n = 0; n < lines; ++n) {
    Slot const slot(n);
    wait_for(&barriers.brought[slot.stage], slot.parity);
    copies.make(slot.stage);
    device::fence_async_proxy();  // products read what was stored
    __syncwarp();
    if (lane == 0) device::arrive(&barriers.copied[slot.stage]);
  }
}

}  // namespace fusedconv::conv::sm90::strips
