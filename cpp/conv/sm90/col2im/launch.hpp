// From a row's shape to its entry in the table: launcher and metadata.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <vector>

#include "conv/failure.hpp"
#include "conv/sm90/boxes/map_axes.hpp"
#include "conv/sm90/col2im/kernel.hpp"
#include "conv/sm90/col2im/rows.hpp"
#include "cuda/launch.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90::col2im {

template <class Traits>
Maps maps_of(Arguments const& a) {
  constexpr int kSize = Traits::kElementBytes;
  Config const& config = a.config;
  Schedule const& s = config.schedule;
  Maps maps;
  MapAxes input = boxes::dense_axes(Layout::kChannelsLast, config.problem.channels,
                                    boxes::input_pixels(config.problem), a.batch, kSize);
  input.box = {cuuint32_t(Traits::kChunk), cuuint32_t(s.box[2]), cuuint32_t(s.box[1]),
               cuuint32_t(s.box[0]), 1};
  input.swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  maps.input = boxes::encoded(config, a.batch, config.row->math, a.input, input);
  auto const channels = cuuint64_t(config.problem.channels);
  MapAxes filter{};
  cuuint64_t line;
  if constexpr (Traits::kLines) {
    bool const packed = a.weight == nullptr;
    line = cuuint64_t(packed ? s.columns : a.weight->stride_c) * kSize;
    filter.extents = {cuuint64_t(packed ? s.columns : line_of(*a.weight)), channels, 1, 1, 1};
    filter.box = {cuuint32_t(kLine), cuuint32_t(Traits::kChunk), 1, 1, 1};
  } else {
    line = channels * kSize;
    filter.extents = {channels, cuuint64_t(s.columns), 1, 1, 1};
    filter.box = {cuuint32_t(Traits::kChunk), cuuint32_t(std::min(Traits::kColumns, kFilterRows)),
                  1, 1, 1};
  }
  filter.strides = {line, line, line, line};
  filter.swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  maps.filter = boxes::encoded(config, a.batch, config.row->math, a.filter, filter);
  return maps;
}

template <Math kMath, Shape kShape>
void launch(Arguments const& a, cudaStream_t stream) {
  using Own = Traits<kMath, kShape>;
  static_assert(Own::kLines || Own::kColumns % std::min(Own::kColumns, kFilterRows) == 0);
  constexpr auto kernel = &convolve<Own>;
  Schedule const& s = a.config.schedule;
  int64_t const blocks = a.batch * s.sample_tiles();
  constexpr int64_t kMost = 0x7fffffff;
  FUSEDCONV_CHECK(blocks <= kMost, a.config.row->name, ": blocks: got ", blocks,
                  ", expected at most ", kMost);
  conv::check_launch(a.config, a.batch, "cudaFuncSetAttribute",
                     device::allow_shared_bytes<kernel>(s.shared_bytes));
  conv::check_launch(a.config, a.batch, "launch",
                     device::launch(kernel, unsigned(blocks), kThreads, s.shared_bytes, stream,
                                    Params::of(a), maps_of<Own>(a)));
}

template <Math kMath, Shape kShape>
void append_row(std::vector<Row>& rows) {
  rows.push_back({.name = detail::join("sm90_col2im_", traits_of(kMath).name, "_", kShape.columns),
                  .math = kMath,
                  .shape = kShape,
                  .launch = &launch<kMath, kShape>});
}

// Of all that there are.
template <Math kMath>
void append_rows(std::vector<Row>& rows) {
  append_row<kMath, Shape{.columns = 64, .slabs = 2}>(rows);
  append_row<kMath, Shape{.columns = 128, .slabs = 1}>(rows);
  append_row<kMath, Shape{.columns = kMostColumns, .slabs = 1}>(rows);
}

}  // namespace fusedconv::conv::sm90::col2im
