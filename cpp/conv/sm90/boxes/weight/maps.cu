#include "conv/sm90/boxes/weight/maps.hpp"

#include "conv/sm90/boxes/map_axes.hpp"

namespace fusedconv::conv::sm90::boxes::weight {

Maps maps_of(Arguments const& a) {
  Config const& config = a.config;
  Problem const& p = config.problem;
  Schedule const& s = config.schedule;
  int const element = config.traits().element_bytes(), batch = int(config.batch);
  auto const axes_of = [&](int channels, Extents const& pixels, Slabs const& slabs) {
    return chunk_axes(dense_axes(Layout::kChannelsLast, channels, pixels, batch, element), slabs,
                      element);
  };
  Slabs positions = s.slabs;
  positions.reach = {};
  Maps maps;
  if (!config.row->block.packs()) {
    maps.input = encoded(config, batch, config.row->math, a.input,
                         axes_of(p.output_channels, output_pixels(p), positions));
  }
  // The bias's sums are of what is not rounded yet.
  bool const rounds = a.bias_sums == nullptr || !config.row->block.from_registers;
  Math const gradient = rounds ? config.row->math : Math::kF32;
  for_each_source(p, s.gather, axes_of(p.channels, input_pixels(p), s.slabs), a.grad_output,
                  [&](std::size_t i, void const* base, MapAxes const& axes) {
                    maps.sources[i] = encoded(config, batch, gradient, base, axes);
                  });
  return maps;
}

}  // namespace fusedconv::conv::sm90::boxes::weight
