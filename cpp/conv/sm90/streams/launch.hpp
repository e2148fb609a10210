// From a row's shape to its entry in the table: launcher and metadata.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "conv/sm90/boxes/map_axes.hpp"
#include "conv/sm90/line_tiles.hpp"
#include "conv/sm90/streams/kernel.hpp"
#include "conv/sm90/streams/rows.hpp"
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
  launch_line<&convolve<Own>>(a, Own::kThreads, Params::of(a), input_map(a), stream);
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
