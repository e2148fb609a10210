// Transposed convolutions along one axis in TF32, of positions from registers by filters that
// stream.
#include <pybind11/stl.h>

#include "binding/binding.hpp"
#include "binding/conv.hpp"
#include "conv/sm90/streams/rows.hpp"

namespace fusedconv::binding {

void bind_sm90_streams(py::module_& room) {
  using namespace conv::sm90::streams;
  py::module_ m = room.def_submodule(
      "streams", "Convolutions along one axis, channels first in TF32: lines as they lie.");
  py::class_<Row>(m, "Row", "One compiled kernel.")
      .def_readonly("name", &Row::name)
      .def_readonly("math", &Row::math)
      .def_property_readonly(
          "columns", [](Row const& row) { return row.shape.columns; },
          "Phases of channels that a block has.");
  m.def("rows", &rows, py::return_value_policy::reference, "The compiled kernels.");
  m.attr("tile") = kTile;
  py::class_<Config>(m, "Config", "How a row serves a problem of any batch size on a device.")
      .def(py::init<Row const&, conv::TransposedProblem const&, Device const&>(), py::arg("row"),
           py::kw_only(), py::arg("problem"), py::arg("device"))
      .def_property_readonly("support", scheduled<Config>(&Schedule::support))
      .def_property_readonly("groups", scheduled<Config>(&Schedule::groups), "Blocks of columns.")
      .def_property_readonly("chunks", scheduled<Config>(&Schedule::chunks), "Of channels.")
      .def_property_readonly("first", scheduled<Config>(&Schedule::first),
                             "Position of the first row of a line's first tile.")
      .def_property_readonly("tiles", scheduled<Config>(&Schedule::tiles), "Of a sample.")
      .def_property_readonly("stages", scheduled<Config>(&Schedule::stages))
      .def_property_readonly("filter_bytes", scheduled<Config>(&Schedule::filter_bytes),
                             "Of a packed filter.")
      .def_property_readonly("shared_bytes", scheduled<Config>(&Schedule::shared_bytes),
                             "Of a block.")
      .def_property_readonly("tile_cycles", scheduled<Config>(&Schedule::tile_cycles),
                             "Estimated.");
  bind_pack_filter<Config>(m);
  bind_convolve<Config>(m);
}

}  // namespace fusedconv::binding
