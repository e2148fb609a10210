// The transposed convolutions of few input channels.
#include <pybind11/stl.h>

#include <memory>
#include <optional>

#include "binding/binding.hpp"
#include "binding/conv.hpp"
#include "conv/few/steps.hpp"

namespace fusedconv::binding {

void bind_few(py::module_& m) {
  using namespace conv::few;
  py::module_ room = m.def_submodule("few", "Transposed convolutions of few input channels.");
  room.attr("takes_moments") = true;
  bind_reading<Config>(room, &rows)
      .def_property_readonly("lines", scheduled<Config>(&Schedule::lines),
                             "Quotients of the stride along height of a block.")
      .def_property_readonly("planes", scheduled<Config>(&Schedule::planes),
                             "Outputs along depth that a block goes through, at most.")
      .def_property_readonly(
          "tiles",
          [](Config const& config) {
            return std::pair(config.schedule.tiles[0], config.schedule.tiles[1]);
          },
          "Of a sample along depth and height.")
      .def_property_readonly("channel_blocks", scheduled<Config>(&Schedule::channel_blocks))
      .def_property_readonly("width_tiles", scheduled<Config>(&Schedule::width_tiles),
                             "Of 32 outputs along width.")
      .def_property_readonly("shared_bytes", scheduled<Config>(&Schedule::shared_bytes),
                             "Of a block.")
      .def_property_readonly("partial_slots", &Config::partial_slots)
      .def_property_readonly("partial_bytes_per_sample", &conv::partial_bytes_of<Config>);
  room.attr("block_channels") = kBlockChannels;
  room.attr("tile_outputs") = kQuotients * kStride;
  py::class_<Convolve, Step, std::shared_ptr<Convolve>>(
      room, "Convolve",
      "Convolution, bias, activation and normalisation by statistics, or partial moments of "
      "activated values in its place.")
      .def(py::init([](Config const& config, Activation activation, bool rounds,
                       std::optional<GroupNormProblem> norm, Operand input, Operand weight,
                       Operand bias, Operand output, Operand partials, Operand statistics,
                       Operand norm_weight, Operand norm_bias) {
             return std::make_shared<Convolve>(
                 config, activation, rounds, norm,
                 Convolve::Operands{input, weight, bias, output, partials, statistics, norm_weight,
                                    norm_bias});
           }),
           py::arg("config"), py::kw_only(), py::arg("activation"), py::arg("rounds"),
           py::arg("norm") = py::none(), py::arg("input"), py::arg("weight"), py::arg("bias"),
           py::arg("output"), py::arg("partials") = Operand(), py::arg("statistics") = Operand(),
           py::arg("norm_weight") = Operand(), py::arg("norm_bias") = Operand());
  bind_merge_moments<Config>(room);
}

}  // namespace fusedconv::binding
