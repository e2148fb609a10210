#include "conv/sm90/runs/tma.hpp"

#include "conv/sm90/tma.hpp"

namespace fusedconv::conv::sm90::runs {

CUtensorMap input_map(Arguments const& a, Tiling const& tiling) {
  if (tiling.strips == 0) return {};
  ConvProblem const& c = a.config.problem;
  int const element = a.config.traits().element_bytes();
  auto const channels = cuuint64_t(c.c), batch = cuuint64_t(a.batch);
  auto const w = cuuint64_t(c.w), h = cuuint64_t(c.h), d = cuuint64_t(c.d);
  cuuint64_t const line = cuuint64_t(a.config.line) * element, plane = line * h,
                   channel = plane * d;
  MapAxes axes{};
  axes.extents = {w, channels, h, d, batch};
  axes.strides = {channel, line, plane, channel * channels};
  axes.box = {cuuint32_t(tiling.columns), cuuint32_t(kKBlockBytes / element),
              cuuint32_t(tiling.lines), 1, 1};
  return encode_map(a.config.row->math, a.input, axes, a.config.row->name, c, a.batch);
}

}  // namespace fusedconv::conv::sm90::runs
