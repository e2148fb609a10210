// From a row's traits to its entry in the table: launcher and metadata.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "conv/failure.hpp"
#include "conv/sm90/boxes/weight/kernel.hpp"
#include "conv/sm90/boxes/weight/maps.hpp"
#include "cuda/launch.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90::boxes::weight {

template <Math kMath, int kChannels, int kUnits>
void launch(Arguments const& a, cudaStream_t stream) {
  constexpr auto kernel = &sum_products<Traits<kMath, kChannels, kUnits>>;
  Config const& config = a.config;
  Schedule const& s = config.schedule;
  int const batch = int(config.batch);
  conv::check_launch(config, batch, "cudaFuncSetAttribute",
                     device::allow_shared_bytes<kernel>(s.shared_bytes));
  conv::check_launch(config, batch, "launch",
                     device::launch(kernel, s.tasks * s.splits, kThreads, s.shared_bytes, stream,
                                    Params::of(a), maps_of(a)));
}

template <Math kMath, int kChannels, int kUnits>
void append_row(std::vector<Row>& rows) {
  rows.push_back({.name = detail::join("sm90_boxes_weight_", traits_of(kMath).name, "_",
                                       kChannels * kUnit, "x", kUnits * kUnit),
                  .math = kMath,
                  .block = Traits<kMath, kChannels, kUnits>::kBlock,
                  .launch = &launch<kMath, kChannels, kUnits>});
}

template <Math kMath>
void append_rows(std::vector<Row>& rows) {
  if constexpr (kMath == Math::kTf32) {
    append_row<kMath, 4, 2>(rows);
    append_row<kMath, 2, 4>(rows);
    append_row<kMath, 1, 8>(rows);
  } else {
    append_row<kMath, 2, 4>(rows);
    append_row<kMath, 1, 4>(rows);
  }
}

}  // namespace fusedconv::conv::sm90::boxes::weight
