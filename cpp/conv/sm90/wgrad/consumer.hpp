// A warpgroup that multiplies for one of the filter's columns, or for one of a task's groups of
// output channels. A step is a line of the gradient:
// its values are loaded at the column's shift, half a strip ahead of the products, and meet the
// lines of the input that the filter's rows reach from it, in one instruction for all rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "conv/sm90/wgmma.hpp"
#include "conv/sm90/wgrad/operand.hpp"
#include "conv/sm90/wgrad/params.hpp"
#include "conv/sm90/wgrad/traits.hpp"
#include "cuda/async.hpp"

namespace fusedconv::conv::sm90::wgrad {

// kStraddles: elements of 16 bits at an odd shift, whose pairs straddle words.
template <class Traits, bool kStraddles>
__device__ __forceinline__ void consume(Params const& p, Barriers& barriers, Memory const& memory,
                                        BlockWork const& work, int warpgroup) {
  using Mma = typename Traits::Mma;
  using Indices = std::make_integer_sequence<int, Traits::kAccumulators>;
  constexpr int kRows = Traits::kFilterRows;
  int const lane = threadIdx.x % 32;
  int const pitch = p.pitch_bytes;
  int const grad_bytes = p.groups * kBlock * pitch;
  uint32_t const own = own_grad<Traits>(p, memory, warpgroup);
  uint64_t const first_line = input_operand<Traits>(memory.input);
  constexpr uint32_t kLineUnits = Traits::kInputBytes >> 4;

  float sums[Traits::kAccumulators];  // of the filter's rows, the last first
#pragma unroll
  for (int i = 0; i < Traits::kAccumulators; ++i) sums[i] = 0.0f;
  uint32_t operands[2][2][4];
  uint32_t line = own;
  auto const load = [&](auto& set, int half) {
#pragma unroll
    for (int i = 0; i < kHalfWords; ++i) {
      uint32_t const at = line + word_offset(half, i, pitch);
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
  OwnPartials<Traits> partials(p, work, warpgroup);
  // All products of the step before are done, and with them the oldest of its lines.
  auto const release = [&] {
    if (through != kNone && lane == 0) device::arrive(&barriers.empty[through]);
    if (++through == p.stages) through = 0;
  };
  constexpr int kTurn = Traits::kTurn;
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
    for (float& sum : sums) cute::warpgroup_fence_operand(sum);
    partials.add(sums);
  }
}

}  // namespace fusedconv::conv::sm90::wgrad
