// LayerNorm over channels on the GPU.
#include <memory>

#include "binding/binding.hpp"
#include "layernorm/steps.hpp"

namespace fusedconv::binding {

void bind_layer_norm(py::module_& m) {
  using layernorm::Normalize;
  py::module_ room = m.def_submodule("layer_norm", "LayerNorm over channels on the GPU.");
  py::class_<Normalize, Step, std::shared_ptr<Normalize>>(
      room, "Normalize", "Activation, LayerNorm over the channels of each pixel, activation.")
      .def(py::init<GroupNormProblem const&, Operand, Operand, Operand, Operand>(), py::kw_only(),
           py::arg("problem"), py::arg("input"), py::arg("weight"), py::arg("bias"),
           py::arg("output"));
}

}  // namespace fusedconv::binding
