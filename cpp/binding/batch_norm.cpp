// BatchNorm of inference on the GPU.
#include <memory>

#include "batchnorm/fold.hpp"
#include "binding/binding.hpp"

namespace fusedconv::binding {

void bind_batch_norm(py::module_& m) {
  using batchnorm::Fold;
  using batchnorm::FoldProblem;
  py::module_ room = m.def_submodule("batch_norm", "BatchNorm of inference on the GPU.");
  py::class_<Fold, Step, std::shared_ptr<Fold>>(
      room, "Fold", "Scale and shift of each channel, from running statistics and parameters.")
      .def(py::init([](int64_t channels, double eps, DType statistics_dtype, DType affine_dtype,
                       Operand mean, Operand variance, Operand weight, Operand bias, Operand scale,
                       Operand shift) {
             FoldProblem const problem{channels, eps, statistics_dtype, affine_dtype};
             return std::make_shared<Fold>(problem, mean, variance, weight, bias, scale, shift);
           }),
           py::kw_only(), py::arg("channels"), py::arg("eps"), py::arg("statistics_dtype"),
           py::arg("affine_dtype"), py::arg("mean"), py::arg("variance"), py::arg("weight"),
           py::arg("bias"), py::arg("scale"), py::arg("shift"));
  using batchnorm::GradientsOfFold;
  py::class_<GradientsOfFold, Step, std::shared_ptr<GradientsOfFold>>(
      room, "GradientsOfFold", "Gradients of weight and bias, from those of scale and shift.")
      .def(py::init([](int64_t channels, double eps, DType statistics_dtype, DType affine_dtype,
                       Operand mean, Operand variance, Operand grad_scale, Operand grad_shift,
                       Operand grad_weight, Operand grad_bias) {
             FoldProblem const problem{channels, eps, statistics_dtype, affine_dtype};
             return std::make_shared<GradientsOfFold>(problem, mean, variance, grad_scale,
                                                      grad_shift, grad_weight, grad_bias);
           }),
           py::kw_only(), py::arg("channels"), py::arg("eps"), py::arg("statistics_dtype"),
           py::arg("affine_dtype"), py::arg("mean"), py::arg("variance"), py::arg("grad_scale"),
           py::arg("grad_shift"), py::arg("grad_weight"), py::arg("grad_bias"));
}

}  // namespace fusedconv::binding
