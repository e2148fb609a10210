// Gradients through normalisations without groups on the GPU.
#include <memory>

#include "binding/binding.hpp"
#include "ungrouped/steps.hpp"

namespace fusedconv::binding {

void bind_ungrouped(py::module_& m) {
  using namespace ungrouped;
  py::module_ room = m.def_submodule(
      "ungrouped",
      "Gradients through LayerNorm over channels, affine maps of channels, an activation alone.");
  py::enum_<Kind>(room, "Kind", "What stands between the activations.")
      .value("layer", Kind::kLayer)
      .value("affine", Kind::kAffine)
      .value("identity", Kind::kIdentity, "Nothing: an activation behind at most.");
  py::class_<GradientConfig>(room, "GradientConfig", "How the gradients are computed.")
      .def_readonly("support", &GradientConfig::support)
      .def_readonly("parts", &GradientConfig::parts, "In which sums by channel are left.")
      .def_property_readonly("partial_bytes", &GradientConfig::partial_bytes);
  room.def("gradient_config", &gradient_config, py::arg("problem"), py::arg("kind"));
  py::class_<Gradient, Step, std::shared_ptr<Gradient>>(
      room, "Gradient", "The input's gradient, and sums by channel in parts.")
      .def(py::init([](GradientConfig const& config, Operand input, Operand grad_output,
                       Operand weight, Operand bias, Operand grad_input, Operand partials) {
             return std::make_shared<Gradient>(
                 config, GradientOperands{input, grad_output, weight, bias, grad_input, partials});
           }),
           py::arg("config"), py::kw_only(), py::arg("input"), py::arg("grad_output"),
           py::arg("weight"), py::arg("bias"), py::arg("grad_input"), py::arg("partials"));
  py::class_<AddParts, Step, std::shared_ptr<AddParts>>(
      room, "AddParts", "The gradients of norm weight, norm bias and the convolution's bias.")
      .def(py::init<GradientConfig const&, Operand, Operand, Operand, Operand>(), py::arg("config"),
           py::kw_only(), py::arg("partials"), py::arg("grad_weight"), py::arg("grad_bias"),
           py::arg("grad_conv_bias"));
}

}  // namespace fusedconv::binding
