// Accumulators to the weight's gradient, where a block has all positions of its task: no sums are
// parts then.
#pragma once

#include <cstdint>

#include "conv/sm90/boxes/weight/params.hpp"
#include "cuda/math.hpp"

namespace fusedconv::conv::sm90::boxes::weight {

template <class T>
struct alignas(2 * sizeof(T)) Pair {
  T first, second;
};

// Where a unit's output channels begin in the weight of the first input channel; null for a unit
// that none of the taps has.
template <class T>
__device__ __forceinline__ T* unit_of_weight(Params const& p, int number, int& channel) {
  if (number >= p.units) return nullptr;
  Unit const unit(p, number);
  channel = unit.channel;
  int line, t, r, s;
  p.weight_s(line, s, unit.tap);
  p.weight_r(t, r, line);
  return static_cast<T*>(p.grad_weight) + t * p.weight.stride_t + r * p.weight.stride_r +
         s * p.weight.stride_s + channel;
}

// sums: of each instruction of a thread, fours of two neighbouring columns of a row and of the row
// 8 below. The weight's output channels are beside each other, whole pairs of them.
template <class Traits, int kInstructions, int kSums>
__device__ __forceinline__ void store_weight(Params const& p, Task const& task, int consumer,
                                             int thread,
                                             float const (&sums)[kInstructions][kSums]) {
  using T = typename Traits::Element;
  constexpr Block kBlock = Traits::kBlock;
  int const lane = thread % 32, warp = thread / 32;
  int const first_unit = task.unit_block * kBlock.units +
                         (Traits::kDividesChannels ? 0 : consumer * Traits::kOwnUnits);
  int const first_input =
      (task.channel_block * kBlock.channels + (Traits::kDividesChannels ? consumer : 0)) * kUnit;
  int channel = 0;
  if constexpr (Traits::kFromRegisters) {
    int const own_input = first_input + lane % 4 * 2;
    int const own_output = channel_of_row(warp, 0, lane / 4);
    int const next_row = channel_of_row(0, 1, 0);
#pragma unroll
    for (int u = 0; u < kInstructions; ++u) {
      T* const unit = unit_of_weight<T>(p, first_unit + u, channel);
      if (unit == nullptr) return;
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        int const input = own_input + i / 4 * 8 + i % 2;
        int const output = own_output + (i % 4 < 2 ? 0 : next_row);
        if (input < p.weight.k && channel + output < p.weight.c) {
          unit[input * p.weight.stride_k + output] = sums[u][i];
        }
      }
    }
  } else {
    int const own_input = first_input + warp * 16 + lane / 4;
    T* unit = nullptr;
#pragma unroll
    for (int i = 0; i < kSums; i += 2) {
      constexpr int kUnitSums = kUnit / 2;
      if (i % kUnitSums == 0) {
        unit = unit_of_weight<T>(p, first_unit + i / kUnitSums, channel);
        if (unit == nullptr) return;
      }
      int const input = own_input + (i % 4 == 0 ? 0 : 8);
      int const output = i % kUnitSums / 4 * 8 + lane % 4 * 2;
      if (input < p.weight.k && channel + output < p.weight.c) {
        *reinterpret_cast<Pair<T>*>(unit + input * p.weight.stride_k + output) = {
            device::from_float<T>(sums[0][i]), device::from_float<T>(sums[0][i + 1])};
      }
    }
  }
}

}  // namespace fusedconv::conv::sm90::boxes::weight
