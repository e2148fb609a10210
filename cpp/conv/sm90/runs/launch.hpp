// From a row's traits to its entry in the table: launcher and metadata.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>
#include <vector>

#include "conv/sm90/runs/kernel.hpp"
#include "conv/sm90/runs/params.hpp"
#include "conv/sm90/runs/rows.hpp"
#include "conv/sm90/runs/tma.hpp"
#include "conv/sm90/runs/traits.hpp"
#include "cuda/launch.hpp"
#include "fusedconv/activation.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90::runs {

inline std::string name_of(Math math, Window const& window, bool interleaves) {
  return detail::join("sm90_runs_", traits_of(math).name, interleaves ? "_interleaved_" : "_",
                      window.before, "_", window.after);
}

template <class Traits>
void launch_kernel(Arguments const& a, cudaStream_t stream) {
  Config const& config = a.config;
  Schedule const& s = config.schedule;
  Params const p = Params::of(a);
  // Whole sets of blocks, one for each 64 output channels. Few tiles spread over multiprocessors.
  int const sets = std::max(1, config.multiprocessors / s.blocks_n);
  int blocks = std::min(turns_of(p), sets) * s.blocks_n;
  if constexpr (Traits::kOwnTaps) blocks = p.first_block[s.block_steps.size()];
  check_launch(a, "cudaFuncSetAttribute",
               device::allow_shared_bytes<&convolve<Traits>>(s.shared_bytes));
  check_launch(a, "launch",
               device::launch(&convolve<Traits>, blocks, Traits::kThreads, s.shared_bytes, stream,
                              p, input_map(a, s.tilings[0]), input_map(a, s.tilings[1])));
}

template <Math kMath, int kBefore, int kAfter, bool kInterleaves>
void launch(Arguments const& a, cudaStream_t stream) {
  // What is stored before the activation, and has no moments, needs none.
  constexpr bool kTakesMoments = !kInterleaves || kBefore + kAfter > 0;
  bool const is_activated = !kTakesMoments || a.activates_output || a.partials != nullptr;
  Activation const activation = is_activated ? a.activation : Activation::kIdentity;
  dispatch_activation(activation, [&](auto form) {
    launch_kernel<Traits<kMath, kBefore, kAfter, kInterleaves, decltype(form)>>(a, stream);
  });
}

template <Math kMath, int kBefore, int kAfter, bool kInterleaves = false>
void append_row(std::vector<Row>& rows) {
  constexpr Window kWindow{kBefore, kAfter};
  rows.push_back({.name = name_of(kMath, kWindow, kInterleaves),
                  .math = kMath,
                  .window = kWindow,
                  .interleaves = kInterleaves,
                  .launch = &launch<kMath, kBefore, kAfter, kInterleaves>});
}

// A row for each window: of three columns with no padding, half of a filter's row and all of it, of
// two with all of it, and of one column. Of sub-pixel phases what filters read that are as large as
// their stride, half again, and twice as large.
template <Math kMath>
void append_rows(std::vector<Row>& rows) {
  append_row<kMath, 2, 0>(rows);
  append_row<kMath, 1, 1>(rows);
  append_row<kMath, 0, 2>(rows);
  append_row<kMath, 0, 1>(rows);
  append_row<kMath, 0, 0>(rows);
  append_row<kMath, 0, 0, true>(rows);
  // In strict fp32 sums of as many steps would be less exact than eager's, of fewer products.
  if constexpr (traits_of(kMath).parts == 1) {
    append_row<kMath, 0, 1, true>(rows);
    append_row<kMath, 1, 1, true>(rows);
  }
}

}  // namespace fusedconv::conv::sm90::runs
