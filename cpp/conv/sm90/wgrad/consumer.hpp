// A warpgroup that multiplies for one of the filter's columns, or for one of a task's groups of
// output channels. A step is a line of the gradient:
// its values are loaded at the column's shift, half a strip ahead of the products, and meet the
// lines of the input that the filter's rows reach from it, in one instruction for all rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "conv/sm90/partial_sums.hpp"
#include "conv/sm90/wgmma.hpp"
#include "conv/sm90/wgrad/params.hpp"
#include "conv/sm90/wgrad/traits.hpp"
#include "cuda/async.hpp"
#include "cute/arch/mma_sm90_desc.hpp"

namespace fusedconv::conv::sm90::wgrad {

// Lines of a strip, a channel each, as copies with a swizzle of as many bytes leave them.
template <class Traits>
__device__ __forceinline__ uint64_t input_operand(uint32_t address) {
  cute::GmmaDescriptor result;
  result.bitfield.start_address_ = uint16_t(address >> 4);
  result.bitfield.leading_byte_offset_ = 1;
  result.bitfield.stride_byte_offset_ = 8 * Traits::kStripBytes >> 4;
  result.bitfield.layout_type_ =
      uint8_t(Traits::kHalves == 1 ? gmma::LayoutType::B64 : gmma::LayoutType::B128);
  return result.desc_;
}

// kStraddles: elements of 16 bits at an odd shift, whose pairs straddle words.
template <class Traits, bool kStraddles>
__device__ __forceinline__ void consume(Params const& p, Barriers& barriers, Memory const& memory,
                                        BlockWork const& work, int warpgroup) {
  using Mma = typename Traits::Mma;
  using Indices = std::make_integer_sequence<int, Traits::kAccumulators>;
  constexpr int kRows = Traits::kFilterRows;
  constexpr int kRowAccumulators = kBlock / 2;
  int const lane = threadIdx.x % 32;
  int const thread = threadIdx.x % kWarpgroupThreads;
  int const group = p.groups > 1 ? warpgroup : 0;
  int const column = warpgroup - group;
  int const channel = group * kBlock + thread / 32 * 16 + lane / 4;
  int const pitch = p.pitch_bytes;
  int const grad_bytes = p.groups * kBlock * pitch;
  int const shift = (p.lead + column - p.pad_w) * Traits::kElementBytes / 4;  // in words
  uint32_t const own = memory.grad + channel * pitch + (shift + lane % 4) * 4;
  uint64_t const first_line = input_operand<Traits>(memory.input);
  constexpr uint32_t kLineUnits = Traits::kInputBytes >> 4;

  float sums[Traits::kAccumulators];  // of the filter's rows, the last first
#pragma unroll
  for (int i = 0; i < Traits::kAccumulators; ++i) sums[i] = 0.0f;
  uint32_t operands[2][2][4];
  uint32_t line = own;
  auto const load = [&](auto& set, int half) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      uint32_t const at =
          line + half * kHalfStripBytes + i / 4 * 32 + (i & 2) * 8 + (i & 1) * 8 * pitch;
      uint32_t& word = set[i / 4][i % 4];
      word = device::load_word(at);
      if constexpr (kStraddles) word = __byte_perm(word, device::load_word(at + 4), 0x5432);
    }
  };
  auto const issue = [&](auto const& set, int half, uint64_t oldest) {
    cute::warpgroup_arrive();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      multiply<Mma>(set[i], oldest + (half * kHalfStripBytes + i * 32 >> 4), sums,
                    gmma::ScaleOut::One, Indices{});
    }
    cute::warpgroup_commit_batch();
  };
  // The line of the input that the filter's last row meets: others follow it, the first stages'
  // behind the last stage's once more.
  auto const oldest_of = [&](int stage) {
    int const newest = stage < kRows - 1 ? stage + p.stages : stage;
    return first_line + uint32_t(newest - (kRows - 1)) * kLineUnits;
  };

  device::RingCursor cursor;
  for (int i = 0; i < kRows - 1; ++i) {
    wait_for(&barriers.full[cursor.stage], cursor.parity);
    cursor.advance(p.stages);
  }
  wait_for(&barriers.full[cursor.stage], cursor.parity);
  line = own + cursor.stage * grad_bytes;
  uint64_t oldest = oldest_of(cursor.stage);
  load(operands[0], 0);
  constexpr int kNone = -1;
  int through = kNone;  // the stage whose last products end next
  auto* const partials =
      reinterpret_cast<float4*>(p.partials +
                                partial_index(p, work.task, work.split, warpgroup, kRows)) +
      thread;
  bool first = true;
  // All products of the step before are done, and with them the oldest of its lines.
  auto const release = [&] {
    if (through != kNone && lane == 0) device::arrive(&barriers.empty[through]);
    if (++through == p.stages) through = 0;
  };
  // Steps of a turn of the loop, in which the operands' two sets alternate.
  constexpr int kTurn = Traits::kHalves == 1 ? 2 : 1;
  int left = Share(p, work.split).steps(p, kRows - 1);
  left = (left + kTurn - 1) / kTurn;
  // After the last step the line at hand is loaded once more, for nothing.
  auto const turn_to_next = [&](bool more) {
    cursor.advance(p.stages);
    oldest = oldest_of(cursor.stage);
    if (more) {
      wait_for(&barriers.full[cursor.stage], cursor.parity);
      line = own + cursor.stage * grad_bytes;
    }
  };
  // Warpgroups add up at different times.
  int chunk = std::max(1, p.flush_steps / kTurn * (warpgroup + 1) / p.warpgroups());
  while (left > 0) {
    int const count = std::min(chunk, left);
    chunk = p.flush_steps / kTurn;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      --left;
      issue(operands[0], 0, oldest);
      cute::warpgroup_wait<1>();
      release();
      if constexpr (Traits::kHalves == 1) {
        turn_to_next(true);
        load(operands[1], 0);
        issue(operands[1], 0, oldest);
        cute::warpgroup_wait<1>();
        release();
        turn_to_next(left > 0);
      } else {
        load(operands[1], 1);
        issue(operands[1], 1, oldest);
        turn_to_next(left > 0);
        cute::warpgroup_wait<1>();
      }
      load(operands[0], 0);
    }
    cute::warpgroup_wait<0>();
#pragma unroll
    for (int i = 0; i < Traits::kAccumulators; ++i) cute::warpgroup_fence_operand(sums[i]);
#pragma unroll
    for (int i = 0; i < Traits::kAccumulators / 4; ++i) {
      constexpr int kFours = kRowAccumulators / 4;
      float4 const four =
          make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
      float4* const target =
          partials + ((kRows - 1 - i / kFours) * kFours + i % kFours) * kWarpgroupThreads;
      leave_sums(target, four, first);
      sums[4 * i] = sums[4 * i + 1] = sums[4 * i + 2] = sums[4 * i + 3] = 0.0f;
    }
    first = false;
  }
}

}  // namespace fusedconv::conv::sm90::wgrad
