// Among how many blocks the positions of a weight gradient's task are split. Host code without
// CUDA.
#pragma once

#include <algorithm>
#include <cstdint>

#include "fusedconv/types.hpp"

namespace fusedconv::conv::sm90 {

// The number that takes the least time, where a block is worth its partial sums from
// `fewest_steps` steps on. block_steps, partial_steps: in steps, what a block costs beside its own,
// and what its partial sums cost the device.
inline int splits_of(int tasks, int64_t steps, int64_t fewest_steps, double block_steps = 8.0,
                     double partial_steps = 0.1) {
  // Blocks that splits are chosen for. Not the device's multiprocessors: sums would then differ
  // between devices.
  constexpr int kBlocks = 132;
  int const most = int(std::clamp<int64_t>(steps / fewest_steps, 1, kBlocks));
  int result = 1;
  double best = 0.0;
  for (int splits = 1; splits <= most; ++splits) {
    double const waves = double(ceil_div(int64_t(tasks) * splits, kBlocks));
    double const cost =
        waves * (double(ceil_div(steps, splits)) + block_steps) + partial_steps * tasks * splits;
    if (splits > 1 && cost >= best) continue;
    best = cost;
    result = splits;
  }
  return result;
}

}  // namespace fusedconv::conv::sm90
