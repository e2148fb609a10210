// What may go wrong with a launch of either kind of tap lists. Config is one of theirs: it has a
// row with a name, a problem and a schedule.
#pragma once

#include <cuda_runtime_api.h>

#include "conv/taps/schedule.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::taps {

template <class Config>
void check_launch(Config const& config, int batch, char const* where, cudaError_t status) {
  if (status == cudaSuccess) return;
  Problem const& c = config.problem;
  auto const by_axis = [&](int AxisProblem::* field) {
    return detail::join(c.axes[0].*field, "x", c.axes[1].*field, "x", c.axes[2].*field);
  };
  throw KernelFailure(detail::join(
      config.row->name, ": ", where, " failed with ", cudaGetErrorName(status), " (",
      cudaGetErrorString(status), ") for N=", batch, " C=", c.channels, " K=", c.output_channels,
      " groups=", c.groups, " input=", by_axis(&AxisProblem::input),
      " output=", by_axis(&AxisProblem::output), " kernel=", by_axis(&AxisProblem::kernel),
      " stride=", by_axis(&AxisProblem::stride), ", ", config.schedule.shared_bytes,
      " bytes of shared memory"));
}

}  // namespace fusedconv::conv::taps
