// From a row's shape to its entry in the table: launcher and metadata.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "conv/sm90/boxes/map_axes.hpp"
#include "conv/sm90/line_tiles.hpp"
#include "conv/sm90/lines/kernel.hpp"
#include "conv/sm90/lines/rows.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90::lines {

inline Maps maps_of(Arguments const& a) {
  constexpr int kSize = 2;
  Config const& config = a.config;
  Schedule const& s = config.schedule;
  TransposedProblem const& problem = config.problem;
  Maps maps;
  MapAxes input = boxes::dense_axes(Layout::kChannelsFirst, problem.channels,
                                    boxes::input_pixels(problem), a.batch, kSize);
  input.box = {kLine, 1, 1, kChunk, 1};
  input.swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  maps.input = boxes::encoded(config, a.batch, config.row->math, a.input, input);
  MapAxes filter{};
  cuuint64_t const line = cuuint64_t(s.channel_pitch) * kSize;
  filter.extents = {cuuint64_t(s.channel_pitch), cuuint64_t(s.filter_bytes) / line, 1, 1, 1};
  filter.strides = {line, line, line, line};
  filter.box = {kChunk, kRows, 1, 1, 1};
  filter.swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  maps.filter = boxes::encoded(config, a.batch, config.row->math, a.filter, filter);
  return maps;
}

template <Math kMath, Shape kShape>
void launch(Arguments const& a, cudaStream_t stream) {
  using Own = Traits<kMath, kShape>;
  launch_line<&convolve<Own>>(a, Own::kThreads, Params::of(a), maps_of(a), stream);
}

template <Math kMath, Shape kShape>
void append_row(std::vector<Row>& rows) {
  rows.push_back({.name = detail::join("sm90_lines_", traits_of(kMath).name, "_", kShape.consumers),
                  .math = kMath,
                  .shape = kShape,
                  .launch = &launch<kMath, kShape>});
}

// Of all that there are.
template <Math kMath>
void append_rows(std::vector<Row>& rows) {
  append_row<kMath, Shape{.consumers = 2}>(rows);
  append_row<kMath, Shape{.consumers = 3}>(rows);
}

}  // namespace fusedconv::conv::sm90::lines
