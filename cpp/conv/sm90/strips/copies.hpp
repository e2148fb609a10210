// Warps that fill the ring: one has lines brought by tensor copies, the others make the copies of
// each that its later taps read.
#pragma once

#include <cstdint>

#include "conv/sm90/strips/params.hpp"
#include "conv/sm90/strips/traits.hpp"
#include "conv/sm90/strips/vectors.hpp"
#include "conv/sm90/wait.hpp"
#include "cuda/async.hpp"
#include "cute/arch/copy_sm90_desc.hpp"
#include "cute/arch/copy_sm90_tma.hpp"

namespace fusedconv::conv::sm90::strips {

// By one thread. What lies outside the image is zeros.
template <class Traits>
__device__ __forceinline__ void bring_lines(Params const& p, Maps const& maps, Block const& block,
                                            Barriers& barriers, unsigned char* shared) {
  constexpr Shape kShape = Traits::kShape;
  constexpr uint32_t kBytes = kShape.copy_bytes() + kShape.tail_bytes();
  constexpr auto kHint = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  int const column = block.strip * kShape.positions - kShape.lead();
  uint32_t n = 0;
  for (Segments segment(p, block); segment.advance(p);) {
    int const last = segment.first + segment.lines + kTaps - 1 - p.lower_h;
#pragma unroll 1
    for (int line = segment.first - p.lower_h; line < last; ++line, ++n) {
      Slot<kShape.stages> const slot(n);
      uint64_t* const brought = &barriers.brought[slot.stage];
      wait_for(&barriers.read[slot.stage], slot.parity ^ 1);
      device::arrive_and_expect(brought, kBytes);
      unsigned char* const target = shared + slot.stage * kShape.line_bytes();
#pragma unroll
      for (int part = 0; part < kShape.parts(); ++part) {
        cute::SM90_TMA_LOAD_5D::copy(&maps.parts, brought, kHint,
                                     target + part * kPartBytes,
                                     column + part * kPart, line, 0, segment.sample, 0);
      }
      cute::SM90_TMA_LOAD_5D::copy(
          &maps.tails, brought, kHint,
          shared + kShape.tails_at() + slot.stage * kShape.tail_bytes(),
          column + kShape.positions, line, 0, segment.sample, 0);
    }
  }
}

// The upper half of a word and the lower half of the one behind it.
__device__ __forceinline__ uint32_t between(uint32_t word, uint32_t behind) {
  return __funnelshift_r(word, behind, 16);
}

// A lane's part of making copies: eight lanes have 128 bytes of shared memory side by side, and a
// warp's channels follow each other by as many bytes as its turns. What is read and stored of a
// turn is at distances that the lane finds out once.
template <class Traits>
class LineCopies {
 public:
  // shared: where the ring begins.
  __device__ __forceinline__ LineCopies(uint32_t shared, int warp, int lane)
      : turns_((kGroups - warp + kCopyWarps - 1) / kCopyWarps) {
    int const unit = lane % kUnits, channel = warp * kOwnChannels + lane / kUnits;
    uint32_t const turn = channel % 8;
    uint32_t const start = shared + channel * kPitch;
    own_ = start + (unit ^ turn) * kVectorBytes;
#pragma unroll
    for (int count = 1; count <= kBehind; ++count) {
      bool const crosses = unit + count >= kUnits;
      int const other = (unit + count) % kUnits;
      behind_[count - 1] =
          start + (other ^ turn) * kVectorBytes + (crosses ? kPartBytes : 0);
      int const tail = channel * kShape.tails() + min(other, kShape.tails() - 1);
      tail_[count - 1] = crosses ? shared + kShape.tails_at() + tail * kVectorBytes : 0;
    }
  }

  __device__ __forceinline__ void make(int stage) const {
    uint32_t const line = stage * kShape.line_bytes(), tails = stage * kShape.tail_bytes();
#pragma unroll 2
    for (int turn = 0; turn < turns_; ++turn) {
      make(turn % 2, line + turn * kTurnBytes, tails + turn * kTurnTailBytes);
    }
  }

 private:
  static constexpr Shape kShape = Traits::kShape;
  static constexpr int kParts = kShape.parts();
  static constexpr int kUnits = kPart / kGranule;
  static constexpr int kOwnChannels = 32 / kUnits;  // of a warp at a time
  static constexpr int kGroups = kChannels / kOwnChannels;
  static constexpr int kTurnBytes = kCopyWarps * kOwnChannels * kPitch;
  static constexpr int kTurnTailBytes =
      kCopyWarps * kOwnChannels * kShape.tails() * kVectorBytes;
  static constexpr int kBehind = kShape.before == 1 ? 2 : 1;  // vectors that are read behind

  // Every other turn's channels are four behind a multiple of eight, by which a swizzle has half of
  // a channel's vectors change places.
  static_assert(kCopyWarps * kOwnChannels % 8 == 4);
  static constexpr uint32_t kOdd = 4 * kVectorBytes;

  // Of the lane's vector in a part, and of the one so many behind it.
  __device__ __forceinline__ uint32_t own(int odd, int part, uint32_t line) const {
    return (own_ ^ odd * kOdd) + line + part * kPartBytes;
  }
  __device__ __forceinline__ uint32_t behind(int odd, int part, int count, uint32_t line,
                                             uint32_t tails) const {
    uint32_t const inner =
        (behind_[count - 1] ^ odd * kOdd) + line + part * kPartBytes;
    if (part + 1 < kParts || tail_[count - 1] == 0) return inner;
    return tail_[count - 1] + tails;
  }

  __device__ __forceinline__ void make(int odd, uint32_t line, uint32_t tails) const {
    if constexpr (kShape.lead() > 0) {
      make_behind_lead(odd, line, tails);
    } else {
      make_from_start(odd, line, tails);
    }
  }

  // The first copy is what was brought.
  __device__ __forceinline__ void make_from_start(int odd, uint32_t line, uint32_t tails) const {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      uint32_t const at = own(odd, part, line);
      uint4 const v = load_vector(at);
      uint32_t const next = device::load_word(behind(odd, part, 1, line, tails));
      store_vector(at + kShape.copy_bytes(), {between(v.x, v.y), between(v.y, v.z),
                                              between(v.z, v.w), between(v.w, next)});
      store_vector(at + 2 * kShape.copy_bytes(), {v.y, v.z, v.w, next});
    }
  }

  // The first position that is read is one or two in front of the lead's end: the first copy takes
  // the place of what was brought. A warp has channels of its own, and reads before it stores; of
  // the part behind that are vectors as they were brought.
  __device__ __forceinline__ void make_behind_lead(int odd, uint32_t line, uint32_t tails) const {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      uint32_t const at = own(odd, part, line);
      uint32_t const before = device::load_word(at + 12);
      uint4 const next = load_vector(behind(odd, part, 1, line, tails));
      uint32_t last = 0;
      if constexpr (kBehind > 1) last = device::load_word(behind(odd, part, 2, line, tails));
      __syncwarp();
      store_behind_lead(at, before, next, last);
    }
  }
  __device__ __forceinline__ static void store_behind_lead(uint32_t at, uint32_t before,
                                                           uint4 const& v, uint32_t last) {
    uint4 const half = {between(before, v.x), between(v.x, v.y), between(v.y, v.z),
                        between(v.z, v.w)};
    if constexpr (kShape.before == 2) {
      store_vector(at, {before, v.x, v.y, v.z});
      store_vector(at + kShape.copy_bytes(), half);
      store_vector(at + 2 * kShape.copy_bytes(), v);
    } else {
      store_vector(at, half);
      store_vector(at + kShape.copy_bytes(), v);
      store_vector(at + 2 * kShape.copy_bytes(), {half.y, half.z, half.w, between(v.w, last)});
    }
  }

  int turns_;
  // In the first line's first part: the lane's vector, and those behind it.
  uint32_t own_, behind_[kBehind];
  uint32_t tail_[kBehind];  // those behind the last part; 0 where they lie in it
};

// By a warp.
template <class Traits>
__device__ __forceinline__ void make_copies(Params const& p, Block const& block, Barriers& barriers,
                                            uint32_t shared, int warp) {
  constexpr int kStages = Traits::kShape.stages;
  int const lane = int(threadIdx.x % 32u);
  LineCopies<Traits> const copies(shared, warp, lane);
  uint32_t lines = 0;
#pragma unroll 1
  for (Segments segment(p, block); segment.advance(p);) lines += segment.lines + kTaps - 1;
#pragma unroll 1
  for (uint32_t n = 0; n < lines; ++n) {
    Slot<kStages> const slot(n);
    wait_for(&barriers.brought[slot.stage], slot.parity);
    copies.make(slot.stage);
    device::fence_async_proxy();  // products read what was stored
    __syncwarp();
    if (lane == 0) device::arrive(&barriers.copied[slot.stage]);
  }
}

}  // namespace fusedconv::conv::sm90::strips
