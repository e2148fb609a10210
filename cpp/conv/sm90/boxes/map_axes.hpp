// Axes of tensor maps for boxes of slabs. Host code.
#pragma once

#include <cuda.h>

#include <array>

#include "conv/failure.hpp"
#include "conv/sm90/boxes/schedule.hpp"
#include "conv/sm90/tma.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90::boxes {

using Extents = std::array<int, kMaxAxes>;  // by depth, height and width

// Of a dense tensor, innermost axis first.
inline MapAxes dense_axes(Layout layout, int channels, Extents const& extents, int64_t batch,
                          int element_bytes) {
  auto const w = cuuint64_t(extents[2]), h = cuuint64_t(extents[1]), d = cuuint64_t(extents[0]),
             k = cuuint64_t(channels), n = cuuint64_t(batch);
  MapAxes axes{};
  if (layout == Layout::kChannelsLast) {
    axes.extents = {k, w, h, d, n};
  } else {
    axes.extents = {w, h, d, k, n};
  }
  cuuint64_t stride = element_bytes;
  for (int i = 0; i < 4; ++i) axes.strides[i] = stride *= axes.extents[i];
  return axes;
}

// A slab's positions by width, height, depth and sample.
inline std::array<cuuint32_t, 4> box_of(Slabs const& slabs) {
  auto const& box = slabs.box;
  return {cuuint32_t(box[2]), cuuint32_t(box[1]), cuuint32_t(box[0]), cuuint32_t(box[3])};
}

// Leaves of a channels last tensor every stride-th pixel from a residue on, so many by axis;
// returns the bytes to the first.
inline cuuint64_t keep_phase(MapAxes& axes, Residues const& residues, Extents const& pixels,
                             std::array<AxisProblem, kMaxAxes> const& problem) {
  cuuint64_t offset = 0;
  for (int axis = 0; axis < kMaxAxes; ++axis) {
    int const dim = kMaxAxes - 1 - axis;  // width 0, height 1, depth 2
    cuuint64_t& stride = axes.strides[dim];
    offset += residues[axis] * stride;
    axes.extents[dim + 1] = cuuint64_t(pixels[axis]);
    if (pixels[axis] > 1) stride *= problem[axis].stride;  // of one the stride has no say
  }
  return offset;
}

// Of a source of a convolution that gathers: its pixels by axis.
inline Extents source_pixels(Problem const& problem, Residues const& residues) {
  Extents pixels;
  for (int a = 0; a < kMaxAxes; ++a) {
    pixels[a] = (problem.axes[a].input - residues[a] - 1) / problem.axes[a].stride + 1;
  }
  return pixels;
}

template <class Config>
CUtensorMap encoded(Config const& config, int batch, Math math, void const* base,
                    MapAxes const& axes) {
  CUtensorMap map;
  CUresult const status = try_encode_map(math, base, axes, map);
  if (status != CUDA_SUCCESS) {
    fail_launch(config, batch, "cuTensorMapEncodeTiled", detail::join("status ", int(status)));
  }
  return map;
}

// Boxes of a chunk of a channels last tensor's channels, swizzled, from the sources of a
// convolution that gathers. encode(number, base, axes).
template <class Encode>
void for_each_source(Problem const& problem, Schedule const& schedule, MapAxes const& whole,
                     void const* base, Encode const& encode) {
  for (std::size_t i = 0; i < schedule.sources.size(); ++i) {
    MapAxes axes = whole;
    Residues const& residues = schedule.sources[i];
    cuuint64_t const offset =
        keep_phase(axes, residues, source_pixels(problem, residues), problem.axes);
    encode(i, static_cast<unsigned char const*>(base) + offset, axes);
  }
}

inline Extents input_pixels(Problem const& p) {
  return {p.axes[0].input, p.axes[1].input, p.axes[2].input};
}
inline Extents output_pixels(Problem const& p) {
  return {p.axes[0].output, p.axes[1].output, p.axes[2].output};
}

// Of a channels last tensor, for boxes of a slab and a chunk of channels.
inline MapAxes chunk_axes(MapAxes axes, Slabs const& slabs, int element_bytes) {
  axes.box = {cuuint32_t(kChunkBytes / element_bytes), cuuint32_t(slabs.extent(2)),
              cuuint32_t(slabs.extent(1)), cuuint32_t(slabs.extent(0)),
              cuuint32_t(slabs.box[kMaxAxes])};
  axes.swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  return axes;
}

}  // namespace fusedconv::conv::sm90::boxes
