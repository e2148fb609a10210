#include "conv/sm90/boxes/maps.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "conv/sm90/boxes/map_axes.hpp"

namespace fusedconv::conv::sm90::boxes {
namespace {

CUtensorMapSwizzle swizzle_of(int row_bytes) {
  switch (row_bytes) {
    case 128: return CU_TENSOR_MAP_SWIZZLE_128B;
    case 64: return CU_TENSOR_MAP_SWIZZLE_64B;
    case 32: return CU_TENSOR_MAP_SWIZZLE_32B;
    default: return CU_TENSOR_MAP_SWIZZLE_NONE;
  }
}

// Lines of a slab, each of all channels of a chunk in turn.
MapAxes plane_axes(MapAxes axes, Slabs const& slabs, int element_bytes) {
  auto const box = box_of(slabs);
  std::swap(axes.extents[1], axes.extents[3]);
  std::swap(axes.extents[2], axes.extents[3]);
  axes.strides = {axes.strides[2], axes.strides[0], axes.strides[1], axes.strides[3]};
  axes.box = {box[0], cuuint32_t(kChunkBytes / element_bytes), box[1], box[2], box[3]};
  axes.swizzle = swizzle_of(int(box[0]) * element_bytes);
  return axes;
}

// Of what is stored at `base`, by phases or sets; one where the convolution gathers.
void store_maps(Arguments const& a, Slabs const& slabs, void* base, CUtensorMap* maps) {
  Config const& config = a.config;
  Problem const& c = config.problem;
  Schedule const& s = config.schedule;
  int const element = config.traits().element_bytes();
  auto const box = box_of(slabs);
  bool const gathers = s.direction == Direction::kGathers;
  // What is stored is rounded no further.
  Math const stored = config.traits().dtype == DType::kFloat32 ? Math::kF32 : config.row->math;
  bool const last = s.layout == Layout::kChannelsLast;
  MapAxes const whole = dense_axes(s.layout, c.output_channels, output_pixels(c), a.batch, element);
  std::size_t const parts = last ? s.phases.size() : s.sets.size();
  for (std::size_t i = 0; i < parts; ++i) {
    MapAxes axes = whole;
    Residues const& residues = s.phases[last ? i : s.sets[i].first];
    Extents outputs;
    for (int axis = 0; axis < kMaxAxes; ++axis) {
      outputs[axis] = s.axes[axis].phase(residues[axis]).outputs;
    }
    cuuint64_t offset = 0;
    if (last && !gathers) offset = keep_phase(axes, residues, outputs, c.axes);
    if (!last) {
      // The phases along width are neighbours, and the copy has all.
      for (int axis = 0; axis < kMaxAxes - 1; ++axis) {
        int const dim = kMaxAxes - 1 - axis;  // height 1, depth 2
        cuuint64_t& stride = axes.strides[dim - 1];
        offset += residues[axis] * stride;
        axes.extents[dim] = cuuint64_t(outputs[axis]);
        if (outputs[axis] > 1) stride *= c.axes[axis].stride;
      }
    }
    if (last) {
      axes.box = {cuuint32_t(s.store_columns), box[0], box[1], box[2], box[3]};
    } else {
      auto const positions = std::min(box[0], cuuint32_t(s.store_positions));
      axes.box = {positions * config.row->shape.segments, box[1], box[2],
                  cuuint32_t(s.store_columns), box[3]};
    }
    axes.swizzle = swizzle_of(int(axes.box[0]) * element);
    maps[i] = encoded(config, a.batch, stored, static_cast<unsigned char*>(base) + offset, axes);
  }
}

// Of a weight whose channels are beside each other: rows of a chunk's, for all columns at a tap.
MapAxes weight_rows(FilterSource const& weight, Shape const& shape, int element_bytes) {
  MapAxes axes{};
  axes.extents = {cuuint64_t(weight.c), cuuint64_t(weight.taps()), cuuint64_t(weight.k), 1, 1};
  auto const tap = cuuint64_t(weight.tap_stride() * element_bytes),
             row = cuuint64_t(weight.stride_k * element_bytes);
  axes.strides = {tap, row, row, row};
  axes.box = {cuuint32_t(kChunkBytes / element_bytes), 1, cuuint32_t(shape.columns), 1, 1};
  axes.swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  return axes;
}

// Of one whose output channels are: a phase's columns at a tap as lines, each for all channels of a
// chunk in turn.
MapAxes weight_lines(FilterSource const& weight, Schedule const& s, int element_bytes) {
  auto const line = cuuint64_t(s.line * element_bytes);
  auto const channel = cuuint64_t(weight.stride_c * element_bytes);
  auto const tap = weight.taps() == 1 ? line : cuuint64_t(weight.tap_stride() * element_bytes);
  MapAxes axes{};
  axes.extents = {cuuint64_t(s.line), cuuint64_t(weight.c), cuuint64_t(weight.k / s.line),
                  cuuint64_t(weight.taps()), 1};
  axes.strides = {channel, line, tap, channel};
  axes.box = {cuuint32_t(s.line), cuuint32_t(kChunkBytes / element_bytes),
              cuuint32_t(s.segment / s.line), 1, 1};
  axes.swizzle = swizzle_of(int(line));
  return axes;
}

}  // namespace

Maps maps_of(Arguments const& a, Slabs const& slabs) {
  Config const& config = a.config;
  Problem const& c = config.problem;
  Schedule const& s = config.schedule;
  int const element = config.traits().element_bytes();
  bool const gathers = s.direction == Direction::kGathers;
  bool const planes = config.row->shape.planes;
  auto const encode = [&](Math math, void const* base, MapAxes const& axes) {
    return encoded(config, a.batch, math, base, axes);
  };

  Maps maps;
  MapAxes input = dense_axes(planes ? Layout::kChannelsFirst : Layout::kChannelsLast, c.channels,
                             input_pixels(c), a.batch, element);
  input = planes ? plane_axes(input, slabs, element) : chunk_axes(input, slabs, element);
  if (gathers) {
    for_each_source(c, s, input, a.input,
                    [&](std::size_t i, void const* base, MapAxes const& axes) {
                      maps.reads[i] = encode(config.row->math, base, axes);
                    });
  } else {
    maps.reads[0] = encode(config.row->math, a.input, input);
  }

  if (a.weight != nullptr) {
    MapAxes const axes = s.line > 0 ? weight_lines(*a.weight, s, element)
                                    : weight_rows(*a.weight, config.row->shape, element);
    maps.weight = encode(config.row->math, a.filter, axes);
  }
  if (a.output != nullptr) store_maps(a, slabs, a.output, maps.writes);
  if (a.saved != nullptr) store_maps(a, slabs, a.saved, maps.saved);
  return maps;
}

}  // namespace fusedconv::conv::sm90::boxes
