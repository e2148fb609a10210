// From a row's shape to its entry in the table: launcher and metadata.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <vector>

#include "conv/failure.hpp"
#include "conv/sm90/boxes/map_axes.hpp"
#include "conv/sm90/streams/kernel.hpp"
#include "conv/sm90/streams/rows.hpp"
#include "cuda/early.hpp"
#include "cuda/launch.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90::streams {

// Lines of a chunk's channels, which copies round to TF32.
inline CUtensorMap input_map(Arguments const& a) {
  Config const& config = a.config;
  TransposedProblem const& problem = config.problem;
  MapAxes axes = boxes::dense_axes(Layout::kChannelsFirst, problem.channels,
                                   boxes::input_pixels(problem), a.batch, sizeof(float));
  axes.box = {kPitch, 1, 1, kChunk, 1};
  return boxes::encoded(config, a.batch, config.row->math, a.input, axes);
}

template <Math kMath, Shape kShape>
void launch(Arguments const& a, cudaStream_t stream) {
  using Own = Traits<kMath, kShape>;
  constexpr auto kernel = &convolve<Own>;
  Schedule const& s = a.config.schedule;
  int64_t const tiles = int64_t(a.batch) * s.tiles;
  constexpr int64_t kMost = 0x7fffffff - 0x10000;  // a step beyond them is counted to
  FUSEDCONV_CHECK(tiles <= kMost, a.config.row->name, ": tiles: got ", tiles, ", expected at most ",
                  kMost);
  // As many blocks for each group of columns, one of each at least.
  int64_t const each = std::clamp<int64_t>(a.config.multiprocessors / s.groups, 1, tiles);
  conv::check_launch(a.config, a.batch, "cudaFuncSetAttribute",
                     device::allow_shared_bytes<kernel>(s.shared_bytes));
  conv::check_launch(
      a.config, a.batch, "launch",
      device::launch_early(a.begins_early, kernel, unsigned(each * s.groups), Own::kThreads,
                           s.shared_bytes, stream, Params::of(a), input_map(a)));
}

template <Math kMath, Shape kShape>
void append_row(std::vector<Row>& rows) {
  rows.push_back({.name = detail::join("sm90_streams_", traits_of(kMath).name, "_", kShape.columns),
                  .math = kMath,
                  .shape = kShape,
                  .launch = &launch<kMath, kShape>});
}

// Of all that there are.
template <Math kMath>
void append_rows(std::vector<Row>& rows) {
  append_row<kMath, Shape{.columns = 128}>(rows);
  append_row<kMath, Shape{.columns = 192}>(rows);
  append_row<kMath, Shape{.columns = 256}>(rows);
}

}  // namespace fusedconv::conv::sm90::streams
