// Transposed convolutions along one axis that multiply lines of the input as they lie.
#include <pybind11/stl.h>

#include "binding/binding.hpp"
#include "binding/conv.hpp"
#include "conv/sm90/lines/rows.hpp"

namespace fusedconv::binding {

void bind_sm90_lines(py::module_& room) {
  using namespace conv::sm90::lines;
  py::module_ m = room.def_submodule(
      "lines", "Convolutions along one axis, channels first: lines of the input as they lie.");
  py::class_<Row>(m, "Row", "One compiled kernel.")
      .def_readonly("name", &Row::name)
      .def_readonly("math", &Row::math)
      .def_property_readonly(
          "consumers", [](Row const& row) { return row.shape.consumers; },
          "Groups of four warps that multiply.");
  m.def("rows", &rows, py::return_value_policy::reference, "The compiled kernels.");
  m.attr("first_output") = kFirstOutput;
  m.attr("outputs") = kOutputs;
  py::class_<Config>(m, "Config", "How a row serves a problem of any batch size on a device.")
      .def(py::init<Row const&, conv::TransposedProblem const&, Device const&>(), py::arg("row"),
           py::kw_only(), py::arg("problem"), py::arg("device"))
      .def_property_readonly("support", scheduled<Config>(&Schedule::support))
      .def_property_readonly("together", scheduled<Config>(&Schedule::together),
                             "Consumers that share a tile of positions.")
      .def_property_readonly("groups", scheduled<Config>(&Schedule::groups),
                             "Of rows, which blocks of their own have.")
      .def_property_readonly("rotation", scheduled<Config>(&Schedule::rotation),
                             "The tap of the first row of a channel's, of as many as the stride.")
      .def_property_readonly("base", scheduled<Config>(&Schedule::base),
                             "The first row's output at position 0.")
      .def_property_readonly("first", scheduled<Config>(&Schedule::first),
                             "Position of the first column of a line's first tile.")
      .def_property_readonly("tiles", scheduled<Config>(&Schedule::tiles), "Of a sample.")
      .def_property_readonly("stages", scheduled<Config>(&Schedule::stages))
      .def_property_readonly("filter_bytes", scheduled<Config>(&Schedule::filter_bytes),
                             "Of a packed filter.")
      .def_property_readonly("kept_bytes", scheduled<Config>(&Schedule::kept_bytes),
                             "Of it in a block's shared memory.")
      .def_property_readonly("shared_bytes", scheduled<Config>(&Schedule::shared_bytes),
                             "Of a block.")
      .def_property_readonly("tile_cycles", scheduled<Config>(&Schedule::tile_cycles),
                             "Estimated.");
  bind_pack_filter<Config>(m);
  bind_convolve<Config>(m);
}

}  // namespace fusedconv::binding
