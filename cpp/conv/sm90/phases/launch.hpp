// From a row's shape to its entry in the table: launcher and metadata.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <vector>

#include "conv/failure.hpp"
#include "conv/sm90/boxes/map_axes.hpp"
#include "conv/sm90/phases/kernel.hpp"
#include "conv/sm90/phases/rows.hpp"
#include "cuda/early.hpp"
#include "cuda/launch.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90::phases {

inline CUtensorMap input_map(Arguments const& a) {
  Config const& config = a.config;
  TransposedProblem const& problem = config.problem;
  MapAxes axes = boxes::dense_axes(Layout::kChannelsLast, problem.channels,
                                   boxes::input_pixels(problem), a.batch, 2);
  axes.box = {kChunk, kHaloEdge, kHaloEdge, cuuint32_t(config.row->shape.axes == kMaxAxes ? 2 : 1),
              1};
  axes.swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  return boxes::encoded(config, a.batch, config.row->math, a.input, axes);
}

template <class Own, Does kDoes>
void launch_kernel(Arguments const& a, cudaStream_t stream) {
  constexpr auto kernel = &convolve<Own, kDoes>;
  Schedule const& s = a.config.schedule;
  int64_t const parts = int64_t(a.batch) * parts_of(a);
  constexpr int64_t kMost = 0x7fffffff - 0x10000;  // a few steps beyond them are counted to
  FUSEDCONV_CHECK(parts <= kMost, a.config.row->name, ": tiles: got ", parts, ", expected at most ",
                  kMost);
  // As many blocks for each block of channels, one of each at least.
  int64_t const each = std::clamp<int64_t>(a.config.multiprocessors / s.channel_blocks, 1, parts);
  conv::check_launch(a.config, a.batch, "cudaFuncSetAttribute",
                     device::allow_shared_bytes<kernel>(s.shared_bytes));
  conv::check_launch(
      a.config, a.batch, "launch",
      device::launch_early(a.begins_early, kernel, unsigned(each * s.channel_blocks), Own::kThreads,
                           s.shared_bytes, stream, Params::of(a, int(each)), input_map(a)));
}

template <Math kMath, Shape kShape>
void launch(Arguments const& a, cudaStream_t stream) {
  using Own = Traits<kMath, kShape>;
  if (a.partials == nullptr) {
    FUSEDCONV_CHECK(a.output != nullptr, a.config.row->name,
                    ": output: got none, expected one where no moments are taken");
    return launch_kernel<Own, Does::kFinishes>(a, stream);
  }
  FUSEDCONV_CHECK(a.output == nullptr, a.config.row->name,
                  ": output: got one, expected none where moments are taken");
  FUSEDCONV_CHECK(a.activation == Activation::kIdentity, a.config.row->name, ": activation: got ",
                  name_of(a.activation), ", expected none where moments are taken");
  launch_kernel<Own, Does::kTakesMoments>(a, stream);
}

template <Math kMath, Shape kShape>
void append_row(std::vector<Row>& rows) {
  rows.push_back({.name = detail::join("sm90_phases_", traits_of(kMath).name, "_", kShape.axes,
                                       "d_", kShape.channels),
                  .math = kMath,
                  .shape = kShape,
                  .launch = &launch<kMath, kShape>});
}

// Of all that there are.
template <Math kMath>
void append_rows(std::vector<Row>& rows) {
  append_row<kMath, Shape{.axes = 2, .channels = 32}>(rows);
  append_row<kMath, Shape{.axes = 2, .channels = 64}>(rows);
  append_row<kMath, Shape{.axes = 3, .channels = 32}>(rows);
  append_row<kMath, Shape{.axes = 3, .channels = 48}>(rows);
}

}  // namespace fusedconv::conv::sm90::phases
