#include "conv/sm90/wgrad/tma.hpp"

#include "conv/sm90/tma.hpp"

namespace fusedconv::conv::sm90::wgrad {
namespace {

struct Extents {
  int w, h, d, channels;
};

CUtensorMap map_of(Config const& config, void const* tensor, Extents const& e, int columns,
                   int channels, CUtensorMapSwizzle swizzle) {
  ConvProblem const& c = config.problem;
  int const element = config.traits().element_bytes();
  cuuint64_t const line = cuuint64_t(padded(e.w, element)) * element, plane = line * e.h,
                   channel = plane * e.d;
  MapAxes axes{};
  axes.extents = {cuuint64_t(e.w), cuuint64_t(e.h), cuuint64_t(e.d), cuuint64_t(e.channels),
                  cuuint64_t(c.n)};
  axes.strides = {line, plane, channel, channel * e.channels};
  axes.box = {cuuint32_t(columns), 1, 1, cuuint32_t(channels), 1};
  axes.swizzle = swizzle;
  return encode_map(config.row->math, tensor, axes, config.row->name, c, c.n);
}

}  // namespace

CUtensorMap input_map(Arguments const& a) {
  ConvProblem const& c = a.config.problem;
  return map_of(
      a.config, a.input, {c.w, c.h, c.d, c.c},
      a.config.schedule.strip_bytes() / a.config.traits().element_bytes(), kBlock,
      a.config.schedule.halves == 1 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B);
}

CUtensorMap grad_map(Arguments const& a) {
  ConvProblem const& c = a.config.problem;
  return map_of(a.config, a.grad_output, {c.q, c.p, c.z, c.k},
                a.config.schedule.pitch_bytes / a.config.traits().element_bytes(),
                a.config.schedule.groups * kBlock, CU_TENSOR_MAP_SWIZZLE_NONE);
}

}  // namespace fusedconv::conv::sm90::wgrad
