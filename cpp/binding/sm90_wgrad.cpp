// The weight gradients of compute capability 9.0.
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "binding/binding.hpp"
#include "binding/conv.hpp"
#include "conv/sm90/wgrad/steps.hpp"

namespace fusedconv::binding {

using namespace conv::sm90::wgrad;

void bind_sm90_wgrad(py::module_& room) {
  py::module_ m = room.def_submodule("wgrad", "Weight gradients.");
  py::class_<Row>(m, "Row", "One compiled kernel.")
      .def_readonly("name", &Row::name)
      .def_readonly("math", &Row::math)
      .def_readonly("filter_rows", &Row::filter_rows);
  m.def("rows", &rows, py::return_value_policy::reference, "The compiled kernels.");
  py::class_<Config>(m, "Config", "How a row serves a problem of a given batch on a device.")
      .def(py::init([](Row const& row, conv::ConvProblem problem, int batch, Layout layout,
                       Device const& device) {
             problem.n = batch;
             return Config(row, problem, layout, device);
           }),
           py::arg("row"), py::kw_only(), py::arg("problem"), py::arg("batch"), py::arg("layout"),
           py::arg("device"))
      .def_property_readonly(
          "row", [](Config const& config) -> Row const& { return *config.row; },
          py::return_value_policy::reference)
      .def_property_readonly("support", scheduled<Config>(&Schedule::support))
      .def_property_readonly("halves", scheduled<Config>(&Schedule::halves),
                             "Of a strip, 64 bytes each.")
      .def_property_readonly("strips", scheduled<Config>(&Schedule::strips),
                             "Of a row of the input.")
      .def_property_readonly("lead", scheduled<Config>(&Schedule::lead),
                             "Columns that a stage's box of the gradient begins before the strip.")
      .def_property_readonly("pitch_bytes", scheduled<Config>(&Schedule::pitch_bytes),
                             "Of a channel's line in that box.")
      .def_property_readonly("stages", scheduled<Config>(&Schedule::stages))
      .def_property_readonly(
          "stage_bytes",
          [](Config const& config) {
            return config.schedule.input_bytes() + config.schedule.grad_bytes();
          },
          "Of a line of a strip and what its taps reach of the gradient.")
      .def_property_readonly("shared_bytes", scheduled<Config>(&Schedule::shared_bytes))
      .def_property_readonly("groups", scheduled<Config>(&Schedule::groups),
                             "Of 64 output channels, in a task.")
      .def_property_readonly("tasks", scheduled<Config>(&Schedule::tasks),
                             "Blocks of input and output channels, for each depth tap.")
      .def_property_readonly("splits", scheduled<Config>(&Schedule::splits), "Blocks of a task.")
      .def_property_readonly("steps", scheduled<Config>(&Schedule::steps),
                             "Rows of strips that a task's blocks take together.")
      .def_property_readonly("partial_bytes", scheduled<Config>(&Schedule::partial_bytes));
  m.attr("flush_steps") = kFlushSteps;
  py::class_<SumProducts, Step, std::shared_ptr<SumProducts>>(
      m, "SumProducts", "The weight gradient in parts; lines of both tensors are padded.")
      .def(py::init<Config const&, Operand, Operand, Operand>(), py::arg("config"), py::kw_only(),
           py::arg("input"), py::arg("grad_output"), py::arg("partials"));
  py::class_<AddPartials, Step, std::shared_ptr<AddPartials>>(
      m, "AddPartials",
      "The weight gradient [C, K, T, R, S] from its parts, in a fixed order; with phases "
      "that of the weight whose planes the config's output channels are. It lies as weight says, "
      "or is contiguous.")
      .def(py::init<Config const&, Operand, Operand, std::optional<conv::PhasePlanes> const&,
                    std::optional<conv::FilterSource> const&>(),
           py::arg("config"), py::kw_only(), py::arg("partials"), py::arg("grad_weight"),
           py::arg("phases") = py::none(), py::arg("weight") = py::none());
}

}  // namespace fusedconv::binding
