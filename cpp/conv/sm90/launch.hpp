// From a row's traits to its entry in the table: launcher and metadata.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "conv/sm90/kernel.hpp"
#include "conv/sm90/params.hpp"
#include "conv/sm90/rows.hpp"
#include "conv/sm90/tma.hpp"
#include "conv/sm90/traits.hpp"
#include "cuda/launch.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90 {

inline std::string name_of(TileShape const& tile) {
  return detail::join("sm90_conv_", tile.traits().name, "_", tile.m(), "x", tile.n(), "_",
                      fusedconv::name_of(tile.sharing));
}

template <class Traits>
void launch_kernel(Arguments const& a, cudaStream_t stream) {
  Config const& config = a.config;
  Params const p = Params::of(a);
  int const blocks = std::min(p.tile_count, config.multiprocessors);
  int const shared_bytes = config.schedule.shared_bytes;
  check_launch(a, "cudaFuncSetAttribute",
               device::allow_shared_bytes<&convolve<Traits>>(shared_bytes));
  CUtensorMap const map = config.schedule.tma ? input_map(a) : CUtensorMap{};
  check_launch(a, "launch",
               device::launch(&convolve<Traits>, blocks, kThreads, shared_bytes, stream, p, map));
}

template <Math kMath, Sharing kSharing>
void launch(Arguments const& a, cudaStream_t stream) {
  if (a.config.layout == Layout::kChannelsFirst) {
    launch_kernel<Traits<kMath, kSharing, Layout::kChannelsFirst>>(a, stream);
  } else {
    launch_kernel<Traits<kMath, kSharing, Layout::kChannelsLast>>(a, stream);
  }
}

// Instantiates a row for each way of sharing.
template <Math kMath, Sharing... kSharing>
void append_rows(std::vector<Row>& rows) {
  (rows.push_back({.name = name_of(TileShape{kMath, kSharing}),
                   .tile = {kMath, kSharing},
                   .launch = &launch<kMath, kSharing>}),
   ...);
}

}  // namespace fusedconv::conv::sm90
