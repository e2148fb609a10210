// The transposed convolutions of few channels a group.
#include <pybind11/stl.h>

#include <memory>

#include "binding/binding.hpp"
#include "binding/conv.hpp"
#include "conv/direct/gradients/steps.hpp"
#include "conv/direct/rows.hpp"

namespace fusedconv::binding {
namespace {

void bind_gradients(py::module_& room) {
  using namespace conv::direct;
  py::class_<GradientConfig>(room, "GradientConfig", "How gradients of depthwise ones are cut.")
      .def_readonly("support", &GradientConfig::support)
      .def_readonly("taps", &GradientConfig::taps)
      .def_readonly("known", &GradientConfig::known, "Whether one pass computes both gradients.")
      .def_readonly("runs", &GradientConfig::runs, "Of a sample, a block each.")
      .def_readonly("run", &GradientConfig::run, "Positions of a block.")
      .def_property_readonly("parts", &GradientConfig::parts, "Of the weight's gradient.")
      .def_property_readonly("partial_bytes", &GradientConfig::partial_bytes);
  room.def("gradient_config", &gradient_config, py::arg("problem"), py::kw_only(), py::arg("dtype"),
           py::arg("batch"));
  py::class_<Gradients, Step, std::shared_ptr<Gradients>>(
      room, "Gradients", "The input's gradient, parts of the weight's, or both.")
      .def(
          py::init([](GradientConfig const& config, conv::FilterSource const& source, Operand input,
                      Operand grad_output, Operand weight, Operand grad_input, Operand partials) {
            return std::make_shared<Gradients>(
                config, source, GradientOperands{input, grad_output, weight, grad_input, partials});
          }),
          py::arg("config"), py::kw_only(), py::arg("source"), py::arg("input"),
          py::arg("grad_output"), py::arg("weight"), py::arg("grad_input"), py::arg("partials"));
  py::class_<AddWeightParts, Step, std::shared_ptr<AddWeightParts>>(
      room, "AddWeightParts", "The weight's gradient, of its parts.")
      .def(py::init<GradientConfig const&, Operand, Operand>(), py::arg("config"), py::kw_only(),
           py::arg("partials"), py::arg("grad_weight"));
}

void bind_few_gradients(py::module_& room) {
  using namespace conv::direct;
  py::class_<few::Config>(room, "FewConfig", "How gradients of few input channels are cut.")
      .def_readonly("support", &few::Config::support)
      .def_property_readonly("taps", &few::Config::taps)
      .def_property_readonly("items", &few::Config::items, "Tiles of the whole batch.")
      .def_property_readonly(
          "lines", [](few::Config const& config) { return config.lines[0] * config.lines[1]; },
          "Of the output's gradient, that a tile stages.")
      .def_readonly("passes", &few::Config::passes, "Of a warp over a line.")
      .def_readonly("values", &few::Config::values, "Of a line, that a thread reads.")
      .def_readonly("shared_bytes", &few::Config::shared_bytes, "Of a block.")
      .def_property_readonly("parts", &few::Config::parts, "Of the weight's gradient.")
      .def_property_readonly("partial_bytes", &few::Config::partial_bytes);
  room.def("few_config", &few::config_of, py::arg("problem"), py::kw_only(), py::arg("dtype"),
           py::arg("batch"));
  py::class_<FewGradients, Step, std::shared_ptr<FewGradients>>(
      room, "FewGradients", "Gradients of few input channels, as Gradients.")
      .def(py::init([](few::Config const& config, conv::FilterSource const& source, Operand input,
                       Operand grad_output, Operand weight, Operand grad_input, Operand partials) {
             return std::make_shared<FewGradients>(
                 config, source,
                 GradientOperands{input, grad_output, weight, grad_input, partials});
           }),
           py::arg("config"), py::kw_only(), py::arg("source"), py::arg("input"),
           py::arg("grad_output"), py::arg("weight"), py::arg("grad_input"), py::arg("partials"));
  py::class_<AddFewParts, Step, std::shared_ptr<AddFewParts>>(
      room, "AddFewParts", "The weight's gradient, of its parts.")
      .def(py::init<few::Config const&, conv::FilterSource const&, Operand, Operand>(),
           py::arg("config"), py::kw_only(), py::arg("target"), py::arg("partials"),
           py::arg("grad_weight"));
}

}  // namespace

void bind_direct(py::module_& m) {
  using namespace conv::direct;
  py::module_ room = m.def_submodule("direct", "Transposed convolutions of few channels a group.");
  bind_reading<Config>(room, &rows)
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
      .def_property_readonly(
          "doubles", scheduled<Config>(&Schedule::doubles),
          "Whether planes are doubled from registers where no moments are taken.")
      .def_property_readonly("channel_blocks", scheduled<Config>(&Schedule::channel_blocks))
      .def_property_readonly("block_channels", scheduled<Config>(&Schedule::block_channels))
      .def_property_readonly("shared_bytes", scheduled<Config>(&Schedule::shared_bytes),
                             "Of a block.")
      .def_property_readonly("partial_slots", &Config::partial_slots)
      .def_property_readonly("partial_bytes_per_sample", &conv::partial_bytes_of<Config>);
  bind_convolve_steps<Config>(room);
  bind_gradients(room);
  bind_few_gradients(room);
}

}  // namespace fusedconv::binding
