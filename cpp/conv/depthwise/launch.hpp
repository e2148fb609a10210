// From a type to its row.
#pragma once

#include "conv/depthwise/kernel.hpp"
#include "conv/depthwise/rows.hpp"
#include "conv/failure.hpp"
#include "cuda/launch.hpp"
#include "cuda/tile.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::depthwise {

template <class T, bool kBulk, bool kActivates>
void launch_kernel(Arguments const& a, cudaStream_t stream) {
  constexpr auto kernel = &convolve_twice<T, kBulk, kActivates>;
  Config const& config = a.config;
  int const bytes = config.schedule.shared_bytes, batch = int(a.norm.batch);
  int const cluster = config.cluster(batch);
  int64_t const blocks = int64_t(batch) * config.problem.groups * cluster;
  constexpr int64_t kMost = 0x7fffffff;
  FUSEDCONV_CHECK(blocks <= kMost, config.row->name, ": blocks: got ", blocks,
                  ", expected at most ", kMost);
  FUSEDCONV_CHECK(!kBulk || device::is_aligned(a.input, 16), config.row->name,
                  ": input: got an address that is no multiple of 16 bytes");
  conv::check_launch(config, batch, "cudaFuncSetAttribute",
                     device::allow_shared_bytes<kernel>(bytes));
  conv::check_launch(config, batch, "launch",
                     device::launch_clusters(kernel, cluster, unsigned(blocks), kThreads, bytes,
                                             stream, Params::of(a, cluster)));
}

template <class T>
void launch(Arguments const& a, cudaStream_t stream) {
  bool const activates = a.norm.activation_before != Activation::kIdentity ||
                         a.norm.activation_after != Activation::kIdentity;
  device::dispatch_bool(a.config.schedule.bulk, [&](auto bulk) {
    device::dispatch_bool(activates,
                          [&](auto each) { launch_kernel<T, bulk.value, each.value>(a, stream); });
  });
}

template <class T>
Row row_of(Math math) {
  return {
      .name = detail::join("depthwise_", traits_of(math).name), .math = math, .launch = &launch<T>};
}

}  // namespace fusedconv::conv::depthwise
