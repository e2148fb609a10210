// The transposed convolutions of few channels a group.
#include <pybind11/stl.h>

#include <memory>

#include "binding/binding.hpp"
#include "binding/conv.hpp"
#include "conv/direct/steps.hpp"

namespace fusedconv::binding {

void bind_direct(py::module_& m) {
  using namespace conv::direct;
  py::module_ room = m.def_submodule("direct", "Transposed convolutions of few channels a group.");
  py::class_<Row>(room, "Row", "The compiled kernels of a type.")
      .def_readonly("name", &Row::name)
      .def_readonly("math", &Row::math);
  room.def("rows", &rows, py::return_value_policy::reference, "The compiled kernels.");
  py::class_<Config>(room, "Config", "How a row serves a problem of any batch size on a device.")
      .def(py::init<Row const&, Problem const&, conv::FilterSource const&, Device const&>(),
           py::arg("row"), py::kw_only(), py::arg("problem"), py::arg("source"), py::arg("device"))
      .def_property_readonly("support", scheduled<Config>(&Schedule::support))
      .def_property_readonly("reads", &Config::reads)
      .def_property_readonly(
          "tile", scheduled<Config>(&Schedule::tile),
          "Quotients of the stride by axis; channels first, outputs along width.")
      .def_property_readonly("tiles", scheduled<Config>(&Schedule::tiles), "Of a sample, by axis.")
      .def_property_readonly("extent", scheduled<Config>(&Schedule::extent),
                             "A tile's outputs along depth and height, from first to last.")
      .def_property_readonly("box", scheduled<Config>(&Schedule::box), "Staged positions by axis.")
      .def_property_readonly("before", scheduled<Config>(&Schedule::before),
                             "From a tile's first quotient to the box's first position.")
      .def_property_readonly("teams", scheduled<Config>(&Schedule::teams), "Of a block.")
      .def_property_readonly("vector", scheduled<Config>(&Schedule::vector),
                             "Channels of a thread, channels last.")
      .def_property_readonly(
          "compiled_taps",
          [](Config const& config) { return config.schedule.run_taps != kGeneral; },
          "Whether kernels know the taps along width.")
      .def_property_readonly("channel_blocks", scheduled<Config>(&Schedule::channel_blocks))
      .def_property_readonly("block_channels", scheduled<Config>(&Schedule::block_channels))
      .def_property_readonly("shared_bytes", scheduled<Config>(&Schedule::shared_bytes),
                             "Of a block.")
      .def_property_readonly("partial_slots", &Config::partial_slots)
      .def_property_readonly("partial_bytes_per_sample", &Config::partial_bytes_per_sample);
  bind_convolve_steps<Config>(room);
}

}  // namespace fusedconv::binding
