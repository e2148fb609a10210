// The convolutions of any stride, filter and layout.
#include <pybind11/stl.h>

#include <memory>

#include "binding/binding.hpp"
#include "binding/conv.hpp"
#include "conv/taps/passes.hpp"

namespace fusedconv::binding {

void bind_taps(py::module_& m) {
  using namespace conv::taps;
  py::module_ room = m.def_submodule("taps", "Transposed convolutions of any stride.");
  py::class_<Row>(room, "Row", "One compiled kernel for each way of reading the input.")
      .def_readonly("name", &Row::name)
      .def_readonly("math", &Row::math)
      .def_readonly("groups", &Row::groups, "Row groups of a block.");
  room.def("rows", &rows, py::return_value_policy::reference, "The compiled kernels.");
  py::class_<Config>(room, "Config", "How a row serves a problem of any batch size on a device.")
      .def(py::init<Row const&, Problem const&, Device const&>(), py::arg("row"), py::kw_only(),
           py::arg("problem"), py::arg("device"))
      .def_property_readonly("support", scheduled<Config>(&Schedule::support))
      .def_property_readonly("reads", &Config::reads)
      .def_property_readonly("blocks_m", scheduled<Config>(&Schedule::blocks_m),
                             "Blocks of rows in a convolution group.")
      .def_property_readonly("tile", scheduled<Config>(&Schedule::tile), "Positions by axis.")
      .def_property_readonly("tiles", scheduled<Config>(&Schedule::tiles),
                             "Of the positions, by axis.")
      .def_property_readonly("split", scheduled<Config>(&Schedule::split),
                             "Axes whose taps are stages.")
      .def_property_readonly("box", scheduled<Config>(&Schedule::box), "Staged positions by axis.")
      .def_property_readonly("width_phases", scheduled<Config>(&Schedule::width_phases))
      .def_property_readonly("chunks", scheduled<Config>(&Schedule::chunks), "Of channels.")
      .def_property_readonly("stages", scheduled<Config>(&Schedule::stages), "Of a chunk.")
      .def_property_readonly("steps", scheduled<Config>(&Schedule::steps), "Of a stage.")
      .def_property_readonly("shared_bytes", scheduled<Config>(&Schedule::shared_bytes))
      .def_property_readonly("filter_bytes", scheduled<Config>(&Schedule::filter_bytes), "Packed.")
      .def_property_readonly("partial_slots", &Config::partial_slots)
      .def_property_readonly("partial_bytes_per_sample", &conv::partial_bytes_of<Config>);
  bind_shared_steps<Config>(room);
}

}  // namespace fusedconv::binding
