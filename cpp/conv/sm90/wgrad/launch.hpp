// From a row's traits to its entry in the table: launcher and metadata.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <vector>

#include "conv/sm90/arguments.hpp"
#include "conv/sm90/wgrad/kernel.hpp"
#include "conv/sm90/wgrad/rows.hpp"
#include "conv/sm90/wgrad/tma.hpp"
#include "cuda/launch.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90::wgrad {

template <class Traits>
void launch_kernel(Arguments const& a, cudaStream_t stream) {
  constexpr auto kKernel = &sum_products<Traits>;
  Config const& config = a.config;
  Schedule const& s = config.schedule;
  int const threads = (config.problem.s * s.groups + 1) * kWarpgroupThreads;
  check_launch(config, config.problem.n, "cudaFuncSetAttribute",
               device::allow_shared_bytes<kKernel>(s.shared_bytes));
  check_launch(config, config.problem.n, "launch",
               device::launch(kKernel, s.tasks * s.splits, threads, s.shared_bytes, stream,
                              Params::of(a), input_map(a), grad_map(a)));
}

template <Math kMath, int kFilterRows>
void launch(Arguments const& a, cudaStream_t stream) {
  if (a.config.schedule.halves == 1) return launch_kernel<Traits<kMath, kFilterRows, 1>>(a, stream);
  launch_kernel<Traits<kMath, kFilterRows, 2>>(a, stream);
}

template <Math kMath, int kFilterRows>
void append_row(std::vector<Row>& rows) {
  rows.push_back({.name = detail::join("sm90_wgrad_", traits_of(kMath).name, "_", kFilterRows),
                  .math = kMath,
                  .filter_rows = kFilterRows,
                  .launch = &launch<kMath, kFilterRows>});
}

template <Math kMath>
void append_rows(std::vector<Row>& rows) {
  append_row<kMath, 1>(rows);
  append_row<kMath, 2>(rows);
  append_row<kMath, 3>(rows);
}

}  // namespace fusedconv::conv::sm90::wgrad
