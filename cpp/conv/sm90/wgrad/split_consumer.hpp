// A warpgroup that multiplies in strict fp32: as consume(), but with both operands in two parts,
// the gradient's made in registers. The tensor core drops bits in every addition to an accumulator,
// so half a strip's products with a line are summed by themselves, the small ones first, and added
// to the line's total with rounding while other warpgroups multiply.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "conv/sm90/wgmma.hpp"
#include "conv/sm90/wgrad/operand.hpp"
#include "conv/sm90/wgrad/params.hpp"
#include "conv/sm90/wgrad/traits.hpp"
#include "cuda/async.hpp"
#include "cuda/math.hpp"

namespace fusedconv::conv::sm90::wgrad {

template <class Traits>
__device__ __forceinline__ void consume_split(Params const& p, Barriers& barriers,
                                              Memory const& memory, BlockWork const& work,
                                              int warpgroup) {
  using Mma = typename Traits::Mma;
  using Indices = std::make_integer_sequence<int, Traits::kRowAccumulators>;
  constexpr int kRows = Traits::kFilterRows;
  constexpr uint32_t kLineUnits = Traits::kInputBytes >> 4;
  int const lane = threadIdx.x % 32;
  int const pitch = p.pitch_bytes;
  int const grad_bytes = p.groups * kBlock * pitch;
  uint32_t const own = own_grad<Traits>(p, memory, warpgroup);
  uint64_t const first_line = input_operand<Traits>(memory.input);
  uint32_t const to_small = memory.small_input - memory.input >> 4;
  OwnPartials<Traits> partials(p, work, warpgroup);

  float totals[Traits::kAccumulators];  // of the filter's rows, the last first
#pragma unroll
  for (float& total : totals) total = 0.0f;
  device::RingCursor cursor;
  auto const wait_for_line = [&] {
    wait_for(&barriers.full[cursor.stage], cursor.parity);
    wait_for(&barriers.split[cursor.stage], cursor.parity);
  };
  for (int i = 0; i < kRows - 1; ++i) {
    wait_for_line();
    cursor.advance(p.stages);
  }
  int through = 0;  // the stage whose last products end next
  int left = Share(p, work.split).steps(p, kRows - 1);
  while (left > 0) {
    int const count = std::min(p.flush_steps, left);
    left -= count;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      wait_for_line();
      uint32_t const line = own + cursor.stage * grad_bytes;
      // The lines that the filter's rows meet lie side by side, the last row's first.
      int const newest = cursor.stage < kRows - 1 ? cursor.stage + p.stages : cursor.stage;
      uint64_t const oldest = first_line + uint32_t(newest - (kRows - 1)) * kLineUnits;
#pragma unroll
      for (int half = 0; half < Traits::kHalves; ++half) {
        uint32_t big[2][4], small[2][4];
#pragma unroll
        for (int w = 0; w < kHalfWords; ++w) {
          float const value =
              __uint_as_float(device::load_word(line + word_offset(half, w, pitch)));
          float const wide = device::big_tf32(value);
          big[w / 4][w % 4] = __float_as_uint(wide);
          // What it has beyond TF32's bits is not worth rounding.
          small[w / 4][w % 4] = __float_as_uint(value - wide);
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          float sums[Traits::kRowAccumulators];
          uint64_t const bigs = oldest + (r * kLineUnits + (half * kHalfStripBytes >> 4));
          cute::warpgroup_arrive();
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            multiply<Mma>(small[k], bigs + k * 2, sums,
                          k > 0 ? gmma::ScaleOut::One : gmma::ScaleOut::Zero, Indices{});
            multiply<Mma>(big[k], bigs + to_small + k * 2, sums, gmma::ScaleOut::One, Indices{});
          }
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            multiply<Mma>(big[k], bigs + k * 2, sums, gmma::ScaleOut::One, Indices{});
          }
          cute::warpgroup_commit_batch();
          cute::warpgroup_wait<0>();
#pragma unroll
          for (int a = 0; a < Traits::kRowAccumulators; ++a) {
            cute::warpgroup_fence_operand(sums[a]);
            totals[r * Traits::kRowAccumulators + a] += sums[a];
          }
        }
      }
      __syncwarp();
      if (lane == 0) device::arrive(&barriers.empty[through]);
      if (++through == p.stages) through = 0;
      cursor.advance(p.stages);
    }
    partials.add(totals);
  }
}

}  // namespace fusedconv::conv::sm90::wgrad
