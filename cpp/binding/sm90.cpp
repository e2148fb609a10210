// The convolutions of compute capability 9.0.
#include <pybind11/native_enum.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <memory>

#include "binding/binding.hpp"
#include "binding/conv.hpp"
#include "conv/sm90/steps.hpp"

namespace fusedconv::binding {
namespace {

using namespace conv::sm90;

void bind_config(py::module_& m) {
  py::class_<Config>(m, "Config", "How a row serves a problem of any batch size on a device.")
      .def(py::init<Row const&, conv::ConvProblem const&, Layout, bool, Device const&>(),
           py::arg("row"), py::kw_only(), py::arg("problem"), py::arg("layout"), py::arg("aligned"),
           py::arg("device"))
      .def_property_readonly(
          "row", [](Config const& config) -> Row const& { return *config.row; },
          py::return_value_policy::reference)
      .def_property_readonly("support", scheduled<Config>(&Schedule::support))
      .def_property_readonly("strips", scheduled<Config>(&Schedule::strips))
      .def_property_readonly("tiles", &Config::tiles, "Of a sample.")
      .def_property_readonly("positions", scheduled<Config>(&Schedule::positions),
                             "Of a strip's raster.")
      .def_property_readonly("strip_width", scheduled<Config>(&Schedule::strip_width))
      .def_property_readonly("pitch_w", scheduled<Config>(&Schedule::pitch_w))
      .def_property_readonly("pitch_h", scheduled<Config>(&Schedule::pitch_h))
      .def_property_readonly("linear", scheduled<Config>(&Schedule::linear))
      .def_property_readonly("k_iterations", scheduled<Config>(&Schedule::k_iterations),
                             "Of a tile.")
      .def_property_readonly("staged_positions", scheduled<Config>(&Schedule::staged_positions))
      .def_property_readonly("input_rows", scheduled<Config>(&Schedule::input_rows),
                             "Of a TMA stage.")
      .def_property_readonly("taps_per_stage", &Config::taps_per_stage,
                             "Steps of the tensor core: filter taps times k-blocks.")
      .def_property_readonly("k_blocks_per_stage", scheduled<Config>(&Schedule::k_blocks_per_stage))
      .def_property_readonly("tma", scheduled<Config>(&Schedule::tma))
      .def_property_readonly("stages", scheduled<Config>(&Schedule::stages))
      .def_property_readonly("shared_bytes", scheduled<Config>(&Schedule::shared_bytes))
      .def_property_readonly("filter_bytes", scheduled<Config>(&Schedule::filter_bytes), "Packed.")
      .def_property_readonly("output_bytes_per_sample", &Config::output_bytes_per_sample)
      .def_property_readonly("partial_bytes_per_sample", &conv::partial_bytes_of<Config>);
}

void bind_steps(py::module_& m) {
  bind_shared_steps<Config>(m);
  py::class_<Finalize, Step, std::shared_ptr<Finalize>>(
      m, "Finalize", "The convolution's output to a tensor's order, normalised on the way.")
      .def(py::init<Config const&, GroupNormProblem const&, Operand, Operand, Operand, Operand,
                    Operand, Operand>(),
           py::arg("config"), py::kw_only(), py::arg("problem"), py::arg("input"),
           py::arg("statistics"), py::arg("weight"), py::arg("bias"), py::arg("output"),
           py::arg("conv_output"));
}

}  // namespace

void bind_sm90(py::module_& m) {
  py::module_ room = m.def_submodule("sm90", "Convolutions for compute capability 9.0.");
  py::native_enum<Sharing> sharing(room, "Sharing", "enum.Enum",
                                   "How two warpgroups share the work.");
  for (std::size_t i = 0; i < kNames<Sharing>.size(); ++i) {
    sharing.value(kNames<Sharing>[i], static_cast<Sharing>(i));
  }
  sharing.finalize();
  py::class_<Row>(room, "Row", "One compiled kernel.")
      .def_readonly("name", &Row::name)
      .def_property_readonly("math", [](Row const& row) { return row.tile.math; })
      .def_property_readonly("sharing", [](Row const& row) { return row.tile.sharing; })
      .def_property_readonly(
          "tile",
          [](Row const& row) { return py::make_tuple(row.tile.m(), row.tile.n(), row.tile.k()); },
          "Output channels, positions, input channels of a k-block.");
  room.def("rows", &rows, py::return_value_policy::reference, "The compiled kernels.");
  bind_config(room);
  bind_steps(room);
  bind_sm90_boxes(room);
  bind_sm90_clusters(room);
  bind_sm90_col2im(room);
  bind_sm90_lines(room);
  bind_sm90_phases(room);
  bind_sm90_runs(room);
  bind_sm90_streams(room);
  bind_sm90_strips(room);
  bind_sm90_taps(room);
  bind_sm90_wgrad(room);
}

}  // namespace fusedconv::binding
