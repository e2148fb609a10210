// Transposed convolutions of stride two that sum all phases of a box of positions at once.
#include <pybind11/stl.h>

#include "binding/binding.hpp"
#include "binding/conv.hpp"
#include "conv/sm90/phases/rows.hpp"
#include "conv/sm90/phases/steps.hpp"

namespace fusedconv::binding {

void bind_sm90_phases(py::module_& room) {
  using namespace conv::sm90::phases;
  py::module_ m = room.def_submodule(
      "phases", "Convolutions of three taps and stride two: all phases of a box at once.");
  py::class_<Row>(m, "Row", "One compiled kernel.")
      .def_readonly("name", &Row::name)
      .def_readonly("math", &Row::math)
      .def_property_readonly(
          "axes", [](Row const& row) { return row.shape.axes; }, "That have a stride.")
      .def_property_readonly(
          "channels", [](Row const& row) { return row.shape.channels; },
          "Of the output, of a block.")
      .def_property_readonly(
          "columns", [](Row const& row) { return row.shape.columns(); },
          "Channels of all phases, of a block.")
      .def_property_readonly(
          "consumers", [](Row const& row) { return row.shape.consumers(); },
          "Groups of four warps that multiply.");
  m.def("rows", &rows, py::return_value_policy::reference, "The compiled kernels.");
  m.def(
      "products",
      [](Row const& row) {
        std::vector<std::array<int, 2>> result;
        for (int depth = 0; depth < row.shape.depth_products(); ++depth) {
          auto const [neighbour, phase] = depth_product(depth);
          for (Product const& each : Products().values) {
            result.push_back({each.neighbour | neighbour, each.phase | phase});
          }
        }
        return result;
      },
      py::arg("row"), "Neighbour and phase of each of a packed filter's taps, as bits of axes.");
  m.def(
      "rounds",
      [](Row const& row, int steps) {
        std::vector<std::array<int, 2>> result;
        for (int number = 0; number < steps * row.shape.depth_products(); ++number) {
          Round const round = round_of(number, steps);
          result.push_back({round.depth_product, round.step});
        }
        return result;
      },
      py::arg("row"), py::arg("steps"),
      "Product along depth and step of 16 input channels, as a packed filter has them.");
  m.def("channel_of", &channel_of, py::arg("column"), py::arg("channels"),
        "Which of a block's output channels a column of a phase is.");
  m.def("tap_of", &tap_of, py::arg("odd"), py::arg("next"),
        "The tap by which an odd phase or an even one meets a neighbour along an axis.");
  m.attr("edge") = kEdge;
  py::class_<Config>(m, "Config", "How a row serves a problem of any batch size on a device.")
      .def(py::init<Row const&, conv::TransposedProblem const&, Device const&>(), py::arg("row"),
           py::kw_only(), py::arg("problem"), py::arg("device"))
      .def_property_readonly("support", scheduled<Config>(&Schedule::support))
      .def_property_readonly("shift", scheduled<Config>(&Schedule::shift),
                             "Of the first neighbour by axis, from the position.")
      .def_property_readonly("tiles", scheduled<Config>(&Schedule::tiles), "Of a sample, by axis.")
      .def_property_readonly("parts", scheduled<Config>(&Schedule::parts),
                             "Of a sample's tiles, by which moments are left.")
      .def_property_readonly("part_tiles", scheduled<Config>(&Schedule::part_tiles))
      .def_property_readonly("channel_blocks", scheduled<Config>(&Schedule::channel_blocks))
      .def_property_readonly("steps", scheduled<Config>(&Schedule::steps), "Of 16 input channels.")
      .def_property_readonly("stages", scheduled<Config>(&Schedule::stages))
      .def_property_readonly("kept_bytes", scheduled<Config>(&Schedule::kept_bytes),
                             "Of the filter in a block's shared memory.")
      .def_property_readonly("filter_bytes", scheduled<Config>(&Schedule::filter_bytes),
                             "Of a packed filter.")
      .def_property_readonly("shared_bytes", scheduled<Config>(&Schedule::shared_bytes),
                             "Of a block.")
      .def_property_readonly("tile_cycles", scheduled<Config>(&Schedule::tile_cycles),
                             "Of a tile's products, estimated.")
      .def_property_readonly("partial_slots", &Config::partial_slots,
                             "Partial moments of a channel in a sample.")
      .def_property_readonly("partial_bytes_per_sample", &conv::partial_bytes_of<Config>);
  bind_shared_steps<Config>(m);
  py::class_<ConvolveNormalizing, Step, std::shared_ptr<ConvolveNormalizing>>(
      m, "ConvolveNormalizing", "Convolution, bias, GroupNorm by statistics, and activation.")
      .def(py::init<Config const&, GroupNormProblem const&, Operand, conv::FilterOperand const&,
                    Operand, Operand, Operand, Operand, Operand>(),
           py::arg("config"), py::kw_only(), py::arg("norm"), py::arg("input"), py::arg("filter"),
           py::arg("bias"), py::arg("statistics"), py::arg("weight"), py::arg("norm_bias"),
           py::arg("output"));
}

}  // namespace fusedconv::binding
