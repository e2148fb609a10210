// From a row's traits to its entry in the table: launcher and metadata.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>
#include <vector>

#include "conv/failure.hpp"
#include "conv/sm90/boxes/filter_first.hpp"
#include "conv/sm90/boxes/kernel.hpp"
#include "conv/sm90/boxes/maps.hpp"
#include "conv/sm90/boxes/params.hpp"
#include "conv/sm90/boxes/rows.hpp"
#include "conv/sm90/boxes/traits.hpp"
#include "cuda/early.hpp"
#include "cuda/launch.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90::boxes {

template <class Traits, Extra kExtra>
constexpr auto kernel_of() {
  if constexpr (Traits::kFilterFirst) {
    return &convolve_filter_first<Traits, kExtra>;
  } else {
    return &convolve<Traits, kExtra>;
  }
}

template <class Traits, Extra kExtra>
void launch_kernel(Arguments const& a, cudaStream_t stream) {
  constexpr auto kernel = kernel_of<Traits, kExtra>();
  Config const& config = a.config;
  bool const has_output = a.output != nullptr, takes_moments = kExtra == Extra::kTakesMoments;
  FUSEDCONV_CHECK(has_output || takes_moments, config.row->name,
                  ": output: got none, expected one where no moments are taken");
  int const shared_bytes = config.schedule.shared_bytes;
  bool const by_sample = a.partials != nullptr || a.group != nullptr;
  Slabs const slabs =
      by_sample ? config.schedule.sample_slabs(a.batch) : config.schedule.slabs(a.batch);
  Params const p = Params::of(a, slabs);
  int64_t const items = int64_t(p.tile_count) * p.blocks;
  int64_t most = int64_t(config.multiprocessors) * Traits::kResidents;
  if constexpr (Traits::kStationary) most = most / p.blocks * p.blocks;
  auto const blocks = unsigned(std::min(items, most));
  conv::check_launch(config, a.batch, "cudaFuncSetAttribute",
                     device::allow_shared_bytes<kernel>(shared_bytes));
  conv::check_launch(config, a.batch, "launch",
                     device::launch_early(a.begins_early, kernel, blocks, Traits::kBlockThreads,
                                          shared_bytes, stream, p, maps_of(a, slabs)));
}

template <Math kMath, Shape kShape>
void launch(Arguments const& a, cudaStream_t stream) {
  constexpr int kElementBytes = traits_of(kMath).element_bytes();
  constexpr bool kScattersLines = has_filter_lines(Direction::kScatters, kElementBytes);
  constexpr bool kGathersLines = has_filter_lines(Direction::kGathers, kElementBytes);
  using Own = Traits<kMath, kShape, kScattersLines>;
  bool const takes_moments = a.partials != nullptr;
  bool const alone = a.saved == nullptr && a.norm == nullptr && a.group == nullptr &&
                     a.config.schedule.direction == Direction::kScatters;
  FUSEDCONV_CHECK(!takes_moments || alone, a.config.row->name,
                  ": partials: got some, expected none beside what is saved or normalised, nor of "
                  "what gathers");
  FUSEDCONV_CHECK(takes_moments || a.activates_output, a.config.row->name,
                  ": activates_output: got false, expected true where no moments are taken");
  if constexpr (kScattersLines != kGathersLines && kShape.segments == 1 &&
                (!kShape.halo || kShape.filter_first())) {
    if (a.config.schedule.direction == Direction::kGathers) {
      return launch_kernel<Traits<kMath, kShape, kGathersLines>, Extra::kNone>(a, stream);
    }
  }
  if constexpr (kShape.filter_first()) {
    FUSEDCONV_CHECK(a.norm == nullptr, a.config.row->name,
                    ": norm: got one, expected none where warps have channels of their own");
  } else if (a.norm != nullptr) {
    return launch_kernel<Own, Extra::kNormalizesPixels>(a, stream);
  }
  if (a.partials != nullptr) return launch_kernel<Own, Extra::kTakesMoments>(a, stream);
  launch_kernel<Own, Extra::kNone>(a, stream);
}

template <Math kMath, Shape kShape>
void append_row(std::vector<Row>& rows) {
  std::string const columns = kShape.segments == 1
                                  ? detail::join(kShape.columns)
                                  : detail::join(kShape.segments, "x", kShape.segment_columns());
  rows.push_back(
      {.name = detail::join("sm90_boxes_", traits_of(kMath).name, "_", columns,
                            kShape.planes ? "_planes" : "", kShape.alike == 1 ? "" : "_alike",
                            kShape.filter_first() ? "_filter_first"
                            : kShape.stationary   ? "_stationary"
                            : kShape.ping_pong    ? "_ping_pong"
                            : kShape.halo         ? "_halo"
                                                  : "",
                            kShape.residents == 1 ? "" : "_pair"),
       .math = kMath,
       .shape = kShape,
       .launch = &launch<kMath, kShape>});
}

}  // namespace fusedconv::conv::sm90::boxes
