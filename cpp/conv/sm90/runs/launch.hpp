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
  if (interleaves) return detail::join("sm90_runs_", traits_of(math).name, "_interleaved");
  return detail::join("sm90_runs_", traits_of(math).name, "_", window.before, "_", window.after);
}

template <class Traits>
void launch_kernel(Arguments const& a, cudaStream_t stream) {
  Config const& config = a.config;
  Schedule const& s = config.schedule;
  Params const p = Params::of(a);
  // Whole sets of blocks, one for each 64 output channels. Few tiles spread over multiprocessors.
  int const sets = std::max(1, config.multiprocessors / s.blocks_n);
  int const turns = int(ceil_div(p.tile_count, s.streams_filter ? Traits::kConsumers : 1));
  int const blocks = std::min(turns, sets) * s.blocks_n;
  check_launch(a, "cudaFuncSetAttribute",
               device::allow_shared_bytes<&convolve<Traits>>(s.shared_bytes));
  check_launch(a, "launch",
               device::launch(&convolve<Traits>, blocks, Traits::kThreads, s.shared_bytes, stream,
                              p, input_map(a, s.tilings[0]), input_map(a, s.tilings[1])));
}

template <Math kMath, int kBefore, int kAfter, bool kInterleaves>
void launch(Arguments const& a, cudaStream_t stream) {
  // What is stored before the activation, and has no moments, needs none.
  bool const is_activated = kInterleaves || a.activates_output || a.partials != nullptr;
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
// two with all of it, and of one column, alone or of each sub-pixel phase.
template <Math kMath>
void append_rows(std::vector<Row>& rows) {
  append_row<kMath, 2, 0>(rows);
  append_row<kMath, 1, 1>(rows);
  append_row<kMath, 0, 2>(rows);
  append_row<kMath, 0, 1>(rows);
  append_row<kMath, 0, 0>(rows);
  append_row<kMath, 0, 0, true>(rows);
}

}  // namespace fusedconv::conv::sm90::runs
