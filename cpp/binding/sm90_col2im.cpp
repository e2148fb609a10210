// Transposed convolutions of few output channels that add up columns.
#include <pybind11/stl.h>

#include <array>

#include "binding/binding.hpp"
#include "binding/conv.hpp"
#include "conv/sm90/col2im/rows.hpp"

namespace fusedconv::binding {

void bind_sm90_col2im(py::module_& room) {
  using namespace conv::sm90::col2im;
  py::module_ m = room.def_submodule(
      "col2im", "Convolutions of few output channels: products of all taps, added up by output.");
  py::class_<Row>(m, "Row", "One compiled kernel.")
      .def_readonly("name", &Row::name)
      .def_readonly("math", &Row::math)
      .def_property_readonly(
          "columns", [](Row const& row) { return row.shape.columns; },
          "Output channels of taps, at most.")
      .def_property_readonly(
          "positions", [](Row const& row) { return row.shape.positions(); }, "Of a block.");
  m.def("rows", &rows, py::return_value_policy::reference, "The compiled kernels.");
  auto const by_axis = [](int const(&values)[conv::kMaxAxes]) {
    return std::array{values[0], values[1], values[2]};
  };
  py::class_<Config>(m, "Config", "How a row serves a problem of any batch size on a device.")
      .def(py::init<Row const&, conv::TransposedProblem const&, Device const&>(), py::arg("row"),
           py::kw_only(), py::arg("problem"), py::arg("device"))
      .def_property_readonly("support", scheduled<Config>(&Schedule::support))
      .def_property_readonly(
          "box", [by_axis](Config const& config) { return by_axis(config.schedule.box); },
          "Input positions of a block by depth, height and width.")
      .def_property_readonly(
          "tile", [by_axis](Config const& config) { return by_axis(config.schedule.tile); },
          "Its outputs, likewise.")
      .def_property_readonly(
          "tiles", [by_axis](Config const& config) { return by_axis(config.schedule.tiles); },
          "Of a sample, likewise.")
      .def_property_readonly("stages", scheduled<Config>(&Schedule::stages))
      .def_property_readonly("filter_bytes", scheduled<Config>(&Schedule::filter_bytes),
                             "Of a packed filter.")
      .def_property_readonly("shared_bytes", scheduled<Config>(&Schedule::shared_bytes),
                             "Of a block.")
      .def_property_readonly("block_cycles", scheduled<Config>(&Schedule::block_cycles),
                             "Estimated.")
      .def("reads_weight", &Config::reads_weight, py::arg("source"),
           "Whether a weight that begins at a multiple of 16 bytes is read as it lies.");
  bind_pack_filter<Config>(m);
  bind_convolve<Config>(m);
}

}  // namespace fusedconv::binding
