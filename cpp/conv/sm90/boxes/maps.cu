#include "conv/sm90/boxes/maps.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "conv/failure.hpp"
#include "conv/sm90/tma.hpp"

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

}  // namespace

Maps maps_of(Arguments const& a, Slabs const& slabs) {
  Config const& config = a.config;
  Problem const& c = config.problem;
  Schedule const& s = config.schedule;
  auto const element = cuuint64_t(config.traits().element_bytes());
  auto const encode = [&](Math math, void const* base, MapAxes const& axes) {
    CUtensorMap map;
    CUresult const status = try_encode_map(math, base, axes, map);
    if (status != CUDA_SUCCESS) {
      fail_launch(config, a.batch, "cuTensorMapEncodeTiled", detail::join("status ", int(status)));
    }
    return map;
  };
  // Of dense tensors, innermost axis first.
  auto const dense = [&](Layout layout, int channels, int AxisProblem::* length) {
    auto const w = cuuint64_t(c.axes[2].*length), h = cuuint64_t(c.axes[1].*length),
               d = cuuint64_t(c.axes[0].*length), k = cuuint64_t(channels), n = cuuint64_t(a.batch);
    MapAxes axes{};
    if (layout == Layout::kChannelsLast) {
      axes.extents = {k, w, h, d, n};
    } else {
      axes.extents = {w, h, d, k, n};
    }
    cuuint64_t stride = element;
    for (int i = 0; i < 4; ++i) axes.strides[i] = stride *= axes.extents[i];
    return axes;
  };
  std::array<cuuint32_t, 4> box;  // by width, height, depth, sample
  for (int i = 0; i < 4; ++i) box[i] = cuuint32_t(slabs.box[i < kMaxAxes ? kMaxAxes - 1 - i : i]);
  auto const chunk = cuuint32_t(kChunkBytes / element);

  Maps maps;
  bool const planes = config.row->shape.planes;
  MapAxes input = dense(planes ? Layout::kChannelsFirst : Layout::kChannelsLast, c.channels,
                        &AxisProblem::input);
  if (planes) {
    // Lines of a slab, each of all channels in turn.
    std::swap(input.extents[1], input.extents[3]);
    std::swap(input.extents[2], input.extents[3]);
    input.strides = {input.strides[2], input.strides[0], input.strides[1], input.strides[3]};
    input.box = {box[0], chunk, box[1], box[2], box[3]};
    input.swizzle = swizzle_of(int(box[0] * element));
  } else {
    input.box = {chunk, box[0], box[1], box[2], box[3]};
    input.swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  }
  maps.input = encode(config.row->math, a.input, input);

  // What is stored is rounded no further.
  Math const stored = config.traits().dtype == DType::kFloat32 ? Math::kF32 : config.row->math;
  bool const last = s.layout == Layout::kChannelsLast;
  MapAxes const whole = dense(s.layout, c.output_channels, &AxisProblem::output);
  int const maps_of_output = int(last ? s.phases.size() : s.sets.size());
  for (int i = 0; i < maps_of_output; ++i) {
    MapAxes axes = whole;
    auto const& phase = s.phases[last ? i : s.sets[i].first];
    cuuint64_t offset = 0;
    // Channels first, the phases along width are neighbours, and the copy has all.
    for (int axis = 0; axis < (last ? kMaxAxes : kMaxAxes - 1); ++axis) {
      int const dim = kMaxAxes - 1 - axis;  // width 0, height 1, depth 2
      cuuint64_t& stride = axes.strides[last ? dim : dim - 1];
      offset += phase[axis] * stride;
      auto const outputs = cuuint64_t(s.axes[axis].phase(phase[axis]).outputs);
      axes.extents[last ? dim + 1 : dim] = outputs;
      if (outputs > 1) stride *= c.axes[axis].stride;  // of one the stride has no say
    }
    if (last) {
      axes.box = {cuuint32_t(s.store_columns), box[0], box[1], box[2], box[3]};
    } else {
      auto const positions = std::min(box[0], cuuint32_t(s.store_positions));
      axes.box = {positions * config.row->shape.segments, box[1], box[2],
                  cuuint32_t(s.store_columns), box[3]};
    }
    axes.swizzle = swizzle_of(int(axes.box[0] * element));
    maps.outputs[i] = encode(stored, static_cast<unsigned char*>(a.output) + offset, axes);
  }
  return maps;
}

}  // namespace fusedconv::conv::sm90::boxes
