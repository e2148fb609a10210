// The convolutions of any stride by warpgroup products.
#include <pybind11/stl.h>

#include "binding/binding.hpp"
#include "binding/conv.hpp"
#include "conv/taps/sm90/passes.hpp"

namespace fusedconv::binding {

void bind_sm90_taps(py::module_& room) {
  using namespace conv::taps::sm90;
  using conv::taps::Problem;
  py::module_ m = room.def_submodule("taps", "Convolutions of any stride by warpgroup products.");
  py::class_<Row>(m, "Row", "One compiled kernel.")
      .def_readonly("name", &Row::name)
      .def_readonly("math", &Row::math)
      .def_property_readonly(
          "row_groups", [](Row const& row) { return row.shape.row_groups; }, "Of a consumer.")
      .def_property_readonly(
          "columns", [](Row const& row) { return row.shape.columns; }, "Of a consumer: positions.");
  m.def("rows", &rows, py::return_value_policy::reference, "The compiled kernels.");
  py::class_<Config>(m, "Config", "How a row serves a problem of any batch size on a device.")
      .def(py::init<Row const&, Problem const&, Device const&>(), py::arg("row"), py::kw_only(),
           py::arg("problem"), py::arg("device"))
      .def_property_readonly("support", scheduled<Config>(&Schedule::support))
      .def_property_readonly("reads", &Config::reads)
      .def_property_readonly("blocks_m", scheduled<Config>(&Schedule::blocks_m),
                             "Blocks of rows in a convolution group.")
      .def_property_readonly(
          "first_tap", scheduled<Config>(&Schedule::first_tap),
          "Of each list in shifts, and behind the last. Lists are by phase along "
          "depth, along height, and row group along width.")
      .def_property_readonly("shifts", scheduled<Config>(&Schedule::taps),
                             "Of each tap: the input position less the output's, by axis.")
      .def_property_readonly("group_phases", scheduled<Config>(&Schedule::group_phases),
                             "Along width, in a row group.")
      .def_property_readonly("group_channels", scheduled<Config>(&Schedule::group_channels),
                             "Output channels of a row group.")
      .def_property_readonly("joined_groups", scheduled<Config>(&Schedule::joined_groups),
                             "Row groups of a consumer that are phases of the same channels.")
      .def_property_readonly("units", scheduled<Config>(&Schedule::units),
                             "Of rows: channels by the phases that a consumer has of them.")
      .def_property_readonly("block_units", scheduled<Config>(&Schedule::block_units),
                             "Of a block.")
      .def_property_readonly("lead", scheduled<Config>(&Schedule::lead),
                             "Columns of the box before the first that is needed.")
      .def_property_readonly(
          "order", [](Config const& config) { return describe(config.schedule.order); },
          "Which pixels are neighbours in a tile: line, boxes, eights or strips.")
      .def_property_readonly("shares_rows", scheduled<Config>(&Schedule::shares_rows),
                             "Consumers have the same rows, and columns of their own.")
      .def_property_readonly("tile", scheduled<Config>(&Schedule::tile), "Positions by axis.")
      .def_property_readonly("tiles", scheduled<Config>(&Schedule::tiles), "Of a sample, by axis.")
      .def_property_readonly("box", scheduled<Config>(&Schedule::box), "Staged positions by axis.")
      .def_property_readonly("positions", scheduled<Config>(&Schedule::positions), "Of a stage.")
      .def_property_readonly("pieces", scheduled<Config>(&Schedule::pieces),
                             "Of 16 bytes of a position's channels, in a stage.")
      .def_property_readonly("chunks", scheduled<Config>(&Schedule::chunks), "Of channels.")
      .def_property_readonly(
          "taps", [](Config const& config) { return config.schedule.mean_taps; },
          "Row groups times taps of a block of rows, on average, in both consumers.")
      .def_property_readonly("stages", scheduled<Config>(&Schedule::stages), "Of the input's ring.")
      .def_property_readonly("slots", scheduled<Config>(&Schedule::slots), "Of the filter's ring.")
      .def_property_readonly("shared_bytes", scheduled<Config>(&Schedule::shared_bytes))
      .def_property_readonly("filter_bytes", scheduled<Config>(&Schedule::filter_bytes), "Packed.")
      .def("launch_tiles", &Config::tiles, py::arg("batch"), py::kw_only(), py::arg("moments"))
      .def_property_readonly("splits", &Config::splits,
                             "Blocks of a cluster, which share the channels of one tile's input.")
      .def_property_readonly("partial_slots", &Config::partial_slots)
      .def_property_readonly("partial_bytes_per_sample", &conv::partial_bytes_of<Config>);
  bind_shared_steps<Config>(m);
}

}  // namespace fusedconv::binding
