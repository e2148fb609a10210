// What may go wrong with the launch of a convolution.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "conv/transposed.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv {

// A status that is no success, for a person. It no longer is the runtime's last error then, which
// somebody else's check would find.
inline std::string failure_of(cudaError_t status) {
  cudaGetLastError();
  return detail::join(cudaGetErrorName(status), " (", cudaGetErrorString(status), ")");
}

// Config has a row with a name, a TransposedProblem and a schedule.
template <class Config>
[[noreturn]] void fail_launch(Config const& config, int batch, char const* where,
                              std::string const& status) {
  TransposedProblem const& c = config.problem;
  auto const by_axis = [&](int AxisProblem::* field) {
    return detail::join(c.axes[0].*field, "x", c.axes[1].*field, "x", c.axes[2].*field);
  };
  throw KernelFailure(detail::join(
      config.row->name, ": ", where, " failed with ", status, " for N=", batch, " C=", c.channels,
      " K=", c.output_channels, " groups=", c.groups, " input=", by_axis(&AxisProblem::input),
      " output=", by_axis(&AxisProblem::output), " kernel=", by_axis(&AxisProblem::kernel),
      " stride=", by_axis(&AxisProblem::stride), ", ", config.schedule.shared_bytes,
      " bytes of shared memory"));
}

template <class Config>
void check_launch(Config const& config, int batch, char const* where, cudaError_t status) {
  if (status == cudaSuccess) return;
  fail_launch(config, batch, where, failure_of(status));
}

}  // namespace fusedconv::conv
