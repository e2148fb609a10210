// From a way of forming products to its row: launcher and metadata.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "conv/failure.hpp"
#include "conv/sm90/clusters/kernel.hpp"
#include "conv/sm90/clusters/rows.hpp"
#include "cuda/launch.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90::clusters {

template <Math kMath, int kTiles>
void launch_tiles(Arguments const& a, cudaStream_t stream) {
  constexpr auto kernel = &convolve<kMath, kTiles>;
  Config const& config = a.config;
  Schedule const& s = config.schedule;
  int const batch = int(a.norm.batch);
  int64_t const blocks = a.norm.batch * s.column_blocks * s.blocks();
  FUSEDCONV_CHECK(blocks <= 0x7fffffff, config.row->name, ": blocks: got ", blocks,
                  ", expected fewer than 2^31");
  conv::check_launch(config, batch, "cudaFuncSetAttribute",
                     device::allow_shared_bytes<kernel>(s.shared_bytes));
  conv::check_launch(config, batch, "launch",
                     device::launch_clusters(kernel, s.blocks(), unsigned(blocks), kThreads,
                                             s.shared_bytes, stream, Params::of(a)));
}

template <Math kMath>
void launch(Arguments const& a, cudaStream_t stream) {
  switch (a.config.schedule.tiles) {
    case 1: return launch_tiles<kMath, 1>(a, stream);
    case 2: return launch_tiles<kMath, 2>(a, stream);
    default: return launch_tiles<kMath, kMostTiles>(a, stream);
  }
}

template <Math kMath>
void append_row(std::vector<Row>& rows) {
  rows.push_back({.name = detail::join("sm90_clusters_", traits_of(kMath).name),
                  .math = kMath,
                  .launch = &launch<kMath>});
}

}  // namespace fusedconv::conv::sm90::clusters
