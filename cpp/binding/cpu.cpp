// Kernels of the processor.
#include "binding/binding.hpp"
#include "cpu/group_norm.hpp"

namespace fusedconv::binding {

void bind_cpu(py::module_& m) {
  py::module_ room = m.def_submodule("cpu", "Kernels of the processor.");
  room.def(
      "group_norm",
      [](GroupNormProblem const& problem, uintptr_t input, uintptr_t output, uintptr_t weight,
         uintptr_t bias, uintptr_t mean, uintptr_t rstd, int threads) {
        GroupNormTensors const tensors{.input = address<void>(input),
                                       .output = address<void>(output),
                                       .weight = address<void>(weight),
                                       .bias = address<void>(bias),
                                       .mean = address<float>(mean),
                                       .rstd = address<float>(rstd)};
        py::gil_scoped_release const release;
        cpu::group_norm(problem, tensors, threads);
      },
      py::arg("problem"), py::kw_only(), py::arg("input"), py::arg("output"), py::arg("weight"),
      py::arg("bias"), py::arg("mean"), py::arg("rstd"), py::arg("threads"),
      "Activation, GroupNorm, activation. Addresses of dense tensors; 0 where weight, bias, mean "
      "or rstd is absent.");
}

}  // namespace fusedconv::binding
