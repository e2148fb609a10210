// The depthwise transposed convolutions that are normalised.
#include <pybind11/stl.h>

#include <memory>

#include "binding/binding.hpp"
#include "binding/conv.hpp"
#include "conv/depthwise/steps.hpp"

namespace fusedconv::binding {

void bind_depthwise(py::module_& m) {
  using namespace conv::depthwise;
  py::module_ room = m.def_submodule("depthwise", "Depthwise ones, normalised in one launch.");
  bind_reading<Config>(room, &rows)
      .def_property_readonly("parts", scheduled<Config>(&Schedule::parts),
                             "Of a channel of a sample, along depth.")
      .def("cluster", &Config::cluster, py::arg("batch"),
           "Blocks of a channel of a sample, which share its parts.")
      .def_property_readonly("lines", scheduled<Config>(&Schedule::lines),
                             "Of the input, of a tile.")
      .def_property_readonly("tiles", scheduled<Config>(&Schedule::tiles),
                             "Of a plane of the input.")
      .def_property_readonly("runs", scheduled<Config>(&Schedule::runs),
                             "Of a line of the input, a thread's each.")
      .def_property_readonly("bulk", scheduled<Config>(&Schedule::bulk),
                             "Whether bulk copies bring the input.")
      .def_property_readonly("shared_bytes", scheduled<Config>(&Schedule::shared_bytes),
                             "Of a block.");
  room.attr("threads") = kThreads;
  room.attr("run") = kRun;
  room.attr("most_parts") = kMostParts;
  room.attr("resident") = kResident;
  py::class_<Forward, Step, std::shared_ptr<Forward>>(
      room, "Forward",
      "Convolution, bias, activation, normalisation of every channel and activation.")
      .def(py::init([](Config const& config, GroupNormProblem const& norm, Operand input,
                       Operand weight, Operand bias, Operand norm_weight, Operand norm_bias,
                       Operand output) {
             return std::make_shared<Forward>(
                 config, norm,
                 Forward::Operands{input, weight, bias, norm_weight, norm_bias, output});
           }),
           py::arg("config"), py::kw_only(), py::arg("norm"), py::arg("input"), py::arg("weight"),
           py::arg("bias"), py::arg("norm_weight"), py::arg("norm_bias"), py::arg("output"));
}

}  // namespace fusedconv::binding
