// Warps that fill the ring: one has lines brought by tensor copies, the others make the copies of
// each that its later taps read.
#pragma once

#include <cstdint>

#include "conv/sm90/strips/params.hpp"
#include "conv/sm90/strips/traits.hpp"
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
    for (int line = segment.first - p.lower_h; line < last; ++line, ++n) {
      Slot<kShape.stages> const slot(n);
      uint64_t* const brought = &barriers.brought[slot.stage];
      wait_for(&barriers.read[slot.stage], slot.parity ^ 1);
      device::arrive_and_expect(brought, kBytes);
      unsigned char* const target = shared + slot.stage * kShape.line_bytes();
#pragma unroll
      for (int part = 0; part < kShape.parts(); ++part) {
        cute::SM90_TMA_LOAD_5D::copy(&maps.parts, brought, kHint,
                                     target + part * kShape.part_bytes(),
                                     column + part * kShape.swizzled, line, 0, segment.sample, 0);
      }
      if constexpr (kShape.tails() > 0) {
        cute::SM90_TMA_LOAD_5D::copy(
            &maps.tails, brought, kHint, shared + kShape.tails_at() + slot.stage * kShape.tail_bytes(),
            column + kShape.parts() * kShape.swizzled, line, 0, segment.sample, 0);
      }
    }
  }
}

__device__ __forceinline__ uint4 load_vector(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address));
  return v;
}

__device__ __forceinline__ void store_vector(uint32_t address, uint4 const& v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

// The upper half of a word and the lower half of the one behind it.
__device__ __forceinline__ uint32_t between(uint32_t word, uint32_t behind) {
  return __funnelshift_r(word, behind, 16);
}

// A lane's part of making copies: eight lanes have 128 bytes of shared memory side by side.
template <class Traits>
class LineCopies {
 public:
  // shared: where the ring begins.
  __device__ __forceinline__ LineCopies(uint32_t shared, int warp, int lane)
      : shared_(shared), warp_(warp), channel_(lane / kUnits), unit_(lane % kUnits) {}

  __device__ __forceinline__ void make(int stage) const {
    if constexpr (kShape.lead() > 0) {
      make_behind_lead(stage);
    } else {
      make_from_start(stage);
    }
  }

 private:
  static constexpr Shape kShape = Traits::kShape;
  static constexpr int kUnits = Traits::kUnits;
  static constexpr int kOwnChannels = 32 / kUnits;  // of a warp at a time

  __device__ __forceinline__ static uint32_t offset(int part, int channel, int unit) {
    int const turned = unit ^ (kUnits == 4 ? channel / 2 % 4 : channel % 8);
    return part * kShape.part_bytes() + channel * kShape.pitch() + turned * kVectorBytes;
  }
  // Of the vector so many behind the lane's in a part.
  __device__ __forceinline__ uint32_t behind(int stage, int part, int channel, int count) const {
    uint32_t const line = shared_ + stage * kShape.line_bytes();
    int const unit = unit_ + count;
    if (unit < kUnits) return line + offset(part, channel, unit);
    if (part + 1 < kShape.parts()) return line + offset(part + 1, channel, unit - kUnits);
    if constexpr (kShape.tails() > 0) {
      int const tail = min(unit - kUnits, kShape.tails() - 1);
      return shared_ + kShape.tails_at() + stage * kShape.tail_bytes() +
             (channel * kShape.tails() + tail) * kVectorBytes;
    }
    return line + offset(part, channel, 0);  // of no product's positions
  }

  // The first copy is what was brought; vectors are read once more than they are stored.
  __device__ __forceinline__ void make_from_start(int stage) const {
    constexpr int kTasks = kShape.parts() * kChannels / kOwnChannels;
#pragma unroll 2
    for (int task = warp_; task < kTasks; task += kCopyWarps) {
      int const part = task % kShape.parts();
      int const channel = task / kShape.parts() * kOwnChannels + channel_;
      uint32_t const own = shared_ + stage * kShape.line_bytes() + offset(part, channel, unit_);
      uint4 const v = load_vector(own);
      uint32_t const next = device::load_word(behind(stage, part, channel, 1));
      store_vector(own + kShape.copy_bytes(), {between(v.x, v.y), between(v.y, v.z),
                                               between(v.z, v.w), between(v.w, next)});
      store_vector(own + 2 * kShape.copy_bytes(), {v.y, v.z, v.w, next});
    }
  }

  // The first position that is read is one or two in front of the lead's end: the first copy takes
  // the place of what was brought. A warp has channels of its own, and reads before it stores.
  __device__ __forceinline__ void make_behind_lead(int stage) const {
    constexpr int kParts = kShape.parts();
    for (int first = warp_ * kOwnChannels; first < kChannels; first += kCopyWarps * kOwnChannels) {
      int const channel = first + channel_;
      uint32_t const line = shared_ + stage * kShape.line_bytes();
      uint32_t before[kParts], last[kParts];
      uint4 next[kParts];
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        before[part] = device::load_word(line + offset(part, channel, unit_) + 12);
        next[part] = load_vector(behind(stage, part, channel, 1));
        if constexpr (kShape.before == 1) {
          last[part] = device::load_word(behind(stage, part, channel, 2));
        }
      }
      __syncwarp();
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        uint32_t const own = line + offset(part, channel, unit_);
        uint32_t const b = before[part];
        uint4 const& v = next[part];
        uint4 const half = {between(b, v.x), between(v.x, v.y), between(v.y, v.z),
                            between(v.z, v.w)};
        if constexpr (kShape.before == 2) {
          store_vector(own, {b, v.x, v.y, v.z});
          store_vector(own + kShape.copy_bytes(), half);
          store_vector(own + 2 * kShape.copy_bytes(), v);
        } else {
          store_vector(own, half);
          store_vector(own + kShape.copy_bytes(), v);
          store_vector(own + 2 * kShape.copy_bytes(),
                       {half.y, half.z, half.w, between(v.w, last[part])});
        }
      }
    }
  }

  uint32_t shared_;
  int warp_, channel_, unit_;
};

// By a warp.
template <class Traits>
__device__ __forceinline__ void make_copies(Params const& p, Block const& block, Barriers& barriers,
                                            uint32_t shared, int warp) {
  constexpr int kStages = Traits::kShape.stages;
  int const lane = int(threadIdx.x % 32u);
  LineCopies<Traits> const copies(shared, warp, lane);
  uint32_t n = 0;
  for (Segments segment(p, block); segment.advance(p);) {
    for (int left = segment.lines + kTaps - 1; left > 0; --left, ++n) {
      Slot<kStages> const slot(n);
      wait_for(&barriers.brought[slot.stage], slot.parity);
      copies.make(slot.stage);
      device::fence_async_proxy();  // products read what was stored
      __syncwarp();
      if (lane == 0) device::arrive(&barriers.copied[slot.stage]);
    }
  }
}

}  // namespace fusedconv::conv::sm90::strips
