// From a row's traits to its entry in the table: launcher and metadata.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "conv/failure.hpp"
#include "conv/sm90/boxes/weight/halos.hpp"
#include "conv/sm90/boxes/weight/kernel.hpp"
#include "conv/sm90/boxes/weight/maps.hpp"
#include "cuda/launch.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90::boxes::weight {

template <auto kKernel>
void launch_blocks(Arguments const& a, int threads, cudaStream_t stream) {
  Config const& config = a.config;
  Schedule const& s = config.schedule;
  int const batch = int(config.batch);
  conv::check_launch(config, batch, "cudaFuncSetAttribute",
                     device::allow_shared_bytes<kKernel>(s.shared_bytes));
  conv::check_launch(config, batch, "launch",
                     device::launch(kKernel, s.tasks * s.splits, threads, s.shared_bytes, stream,
                                    Params::of(a), maps_of(a)));
}

template <class Traits>
void launch_kernel(Arguments const& a, cudaStream_t stream) {
  Config const& config = a.config;
  Schedule const& s = config.schedule;
  if constexpr (Traits::kBlock.transposes) {
    // A warp that skipped a phase of a barrier that it waits for could not tell the next from it.
    bool const waits_for_every_phase = kInputBoxes<Traits> >= kTransposingWarps ||
                                       s.stages * kInputBoxes<Traits> % kTransposingWarps == 0;
    FUSEDCONV_CHECK(waits_for_every_phase, config.row->name, ": stages: got ", s.stages);
  }
  launch_blocks<&sum_products<Traits>>(a, kThreads, stream);
}

template <Math kMath>
void launch_halos(Arguments const& a, cudaStream_t stream) {
  using Own = HaloTraits<kMath>;
  FUSEDCONV_CHECK(a.bias_sums == nullptr, a.config.row->name,
                  ": bias_sums: got some, expected none where boxes have halos");
  launch_blocks<&sum_halo_products<Own>>(a, Own::kBlockThreads, stream);
}

template <Math kMath, int kChannels, int kUnits, bool kTransposes>
void launch(Arguments const& a, cudaStream_t stream) {
  if constexpr (Traits<kMath, kChannels, kUnits, kTransposes>::kBlock.sums_bias()) {
    if (a.bias_sums != nullptr) {
      return launch_kernel<Traits<kMath, kChannels, kUnits, kTransposes, true>>(a, stream);
    }
  }
  launch_kernel<Traits<kMath, kChannels, kUnits, kTransposes>>(a, stream);
}

template <Math kMath, int kChannels, int kUnits, bool kTransposes = false>
void append_row(std::vector<Row>& rows) {
  rows.push_back(
      {.name = detail::join("sm90_boxes_weight_", traits_of(kMath).name, "_", kChannels * kUnit,
                            "x", kUnits * kUnit, kTransposes ? "_transposing" : ""),
       .math = kMath,
       .block = Traits<kMath, kChannels, kUnits, kTransposes>::kBlock,
       .launch = &launch<kMath, kChannels, kUnits, kTransposes>});
}

template <Math kMath>
void append_rows(std::vector<Row>& rows) {
  if constexpr (kMath == Math::kTf32) {
    append_row<kMath, 4, 2>(rows);
    append_row<kMath, 2, 4>(rows);
    append_row<kMath, 1, 8>(rows);
    append_row<kMath, 4, 2, true>(rows);
    append_row<kMath, 1, 8, true>(rows);
  } else {
    append_row<kMath, 2, 4>(rows);
    append_row<kMath, 1, 4>(rows);
    constexpr Block kBlock = HaloTraits<kMath>::kBlock;
    rows.push_back({.name = detail::join("sm90_boxes_weight_", traits_of(kMath).name, "_", kUnit,
                                         "x", kBlock.units * kUnit, "_halo"),
                    .math = kMath,
                    .block = kBlock,
                    .launch = &launch_halos<kMath>});
  }
}

}  // namespace fusedconv::conv::sm90::boxes::weight
