// The convolutions of compute capability 9.0 whose filter stays in registers.
#include <pybind11/stl.h>

#include "binding/binding.hpp"
#include "binding/conv.hpp"
#include "conv/sm90/strips/rows.hpp"

namespace fusedconv::binding {

void bind_sm90_strips(py::module_& room) {
  using namespace conv::sm90::strips;
  py::module_ m = room.def_submodule(
      "strips", "Convolutions whose filter stays in registers, by blocks that go down strips.");
  py::class_<Row>(m, "Row", "One compiled kernel.")
      .def_readonly("name", &Row::name)
      .def_readonly("math", &Row::math)
      .def_property_readonly(
          "before", [](Row const& row) { return row.reach.before; },
          "Columns of the input before an output's that the filter reads.");
  m.attr("positions") = kPositions;
  m.attr("stages") = kStages;
  m.attr("most_lines") = kMostLines;
  m.def("rows", &rows, py::return_value_policy::reference, "The compiled kernels.");
  py::class_<Config>(m, "Config", "How a row serves a problem of any batch size on a device.")
      .def(py::init<Row const&, conv::ConvProblem const&, Layout, bool, bool, Device const&>(),
           py::arg("row"), py::kw_only(), py::arg("problem"), py::arg("layout"), py::arg("aligned"),
           py::arg("padded_lines") = false, py::arg("device"))
      .def_property_readonly("support", scheduled<Config>(&Schedule::support))
      .def_property_readonly("strips", scheduled<Config>(&Schedule::strips))
      .def_property_readonly("blocks_n", scheduled<Config>(&Schedule::blocks_n),
                             "Of output channels.")
      .def_property_readonly("sets", scheduled<Config>(&Schedule::sets),
                             "Of blocks, one for each strip and block of output channels.")
      .def_property_readonly("filter_bytes", scheduled<Config>(&Schedule::filter_bytes), "Packed.")
      .def_property_readonly("shared_bytes", scheduled<Config>(&Schedule::shared_bytes),
                             "Of a block.");
  bind_pack_filter<Config>(m);
  bind_convolve<Config>(m);
}

}  // namespace fusedconv::binding
