// From a row's traits to its entry in the table: launcher and metadata.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "conv/failure.hpp"
#include "conv/taps/kernel.hpp"
#include "conv/taps/rows.hpp"
#include "conv/taps/traits.hpp"
#include "cuda/launch.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::taps {

// Blocks of a launch.
unsigned checked_blocks(Arguments const& arguments);

template <class Traits>
void launch_kernel(Arguments const& a, cudaStream_t stream) {
  constexpr auto kernel = &convolve<Traits>;
  int const shared_bytes = a.config.schedule.shared_bytes;
  check_launch(a.config, a.batch, "cudaFuncSetAttribute",
               device::allow_shared_bytes<kernel>(shared_bytes));
  kernel<<<checked_blocks(a), kThreads, shared_bytes, stream>>>(Params::of(a));
  check_launch(a.config, a.batch, "launch", cudaGetLastError());
}

template <Math kMath, int kGroups>
void launch(Arguments const& a, cudaStream_t stream) {
  switch (a.config.schedule.loads) {
    case Loads::kPlanes: return launch_kernel<Traits<kMath, kGroups, Loads::kPlanes>>(a, stream);
    case Loads::kChannels:
      return launch_kernel<Traits<kMath, kGroups, Loads::kChannels>>(a, stream);
    case Loads::kElements:
      return launch_kernel<Traits<kMath, kGroups, Loads::kElements>>(a, stream);
  }
}

template <Math kMath, int... kGroups>
void append_rows(std::vector<Row>& rows) {
  (rows.push_back({.name = detail::join("taps_", traits_of(kMath).name, "_", kGroups),
                   .math = kMath,
                   .groups = kGroups,
                   .launch = &launch<kMath, kGroups>}),
   ...);
}

}  // namespace fusedconv::conv::taps
