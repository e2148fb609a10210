// From a row's traits to its entry in the table: launcher and metadata.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>
#include <vector>

#include "conv/failure.hpp"
#include "conv/taps/sm90/kernel.hpp"
#include "conv/taps/sm90/params.hpp"
#include "conv/taps/sm90/rows.hpp"
#include "conv/taps/sm90/traits.hpp"
#include "cuda/launch.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::taps::sm90 {

template <Math kMath, int kRowGroups, int kColumns>
void launch(Arguments const& a, cudaStream_t stream) {
  using Own = Traits<kMath, kRowGroups, kColumns>;
  Config const& config = a.config;
  int const shared_bytes = config.schedule.shared_bytes;
  Params const p = Params::of(a);
  int64_t const items = int64_t(p.tile_count) * p.blocks;
  int const splits = 1 << p.split_shift;
  int64_t const most = config.multiprocessors;
  // A cluster has one item, as its blocks' shared memory passes sums on in the end.
  int64_t const blocks = splits > 1 ? items * splits : std::min(items, most);
  check_launch(config, a.batch, "cudaFuncSetAttribute",
               device::allow_shared_bytes<&convolve<Own>>(shared_bytes));
  check_launch(config, a.batch, "launch",
               device::launch_clusters(&convolve<Own>, splits, int(blocks), kThreads, shared_bytes,
                                       stream, p));
}

template <Math kMath, int kRowGroups, int kColumns>
void append_row(std::vector<Row>& rows) {
  rows.push_back({.name = detail::join("sm90_taps_", traits_of(kMath).name, "_",
                                       kRowGroups * kInstructionRows, "x", kColumns),
                  .math = kMath,
                  .shape = {.row_groups = kRowGroups, .columns = kColumns},
                  .launch = &launch<kMath, kRowGroups, kColumns>});
}

}  // namespace fusedconv::conv::taps::sm90
