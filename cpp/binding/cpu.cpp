// Kernels of the processor.
#include <pybind11/stl.h>

#include "binding/binding.hpp"
#include "cpu/batch_norm.hpp"
#include "cpu/channel_sums.hpp"
#include "cpu/direct.hpp"
#include "cpu/group_norm.hpp"
#include "cpu/huge_pages.hpp"
#include "cpu/layer_norm.hpp"
#include "cpu/loops.hpp"
#include "cpu/pixel_shuffle.hpp"
#include "cpu/ungrouped_gradients.hpp"

namespace fusedconv::binding {

void bind_cpu(py::module_& m) {
  py::module_ room = m.def_submodule("cpu", "Kernels of the processor.");
  room.def("instruction_sets", cpu::instruction_sets,
           "Instruction sets that the build and this processor have, the widest first.");
  room.def(
      "instruction_set", [] { return cpu::loops().instruction_set; },
      "The one in use; the environment variable FUSEDCONV_INSTRUCTION_SET names another.");
  room.def("free_bytes_in_pieces", cpu::free_bytes_in_pieces, py::arg("buddyinfo"), py::kw_only(),
           py::arg("page_bytes"), py::arg("piece_bytes"),
           "Of memory in pieces of at least so many bytes, from the text of /proc/buddyinfo.");
  // Positional: names take longer than the kernel does on a small tensor.
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
      py::arg("problem"), py::arg("input"), py::arg("output"), py::arg("weight"), py::arg("bias"),
      py::arg("mean"), py::arg("rstd"), py::arg("threads"),
      "Activation, GroupNorm, activation. Addresses of dense tensors; 0 where weight, bias, mean "
      "or rstd is absent.");
  auto const without_statistics = [](auto function) {
    return [function](GroupNormProblem const& problem, uintptr_t input, uintptr_t output,
                      uintptr_t weight, uintptr_t bias, int threads) {
      GroupNormTensors const tensors{.input = address<void>(input),
                                     .output = address<void>(output),
                                     .weight = address<void>(weight),
                                     .bias = address<void>(bias)};
      py::gil_scoped_release const release;
      function(problem, tensors, threads);
    };
  };
  room.def("activate", without_statistics(&cpu::activate), py::arg("problem"), py::arg("input"),
           py::arg("output"), py::arg("weight"), py::arg("bias"), py::arg("threads"),
           "Activation, weight and bias of each channel, activation, of a problem without its "
           "normalisation. Addresses of dense tensors; 0 where weight or bias is absent.");
  room.def("layer_norm", without_statistics(&cpu::layer_norm), py::arg("problem"), py::arg("input"),
           py::arg("output"), py::arg("weight"), py::arg("bias"), py::arg("threads"),
           "Activation, LayerNorm over the channels of each pixel, activation. Addresses of dense "
           "tensors; 0 where weight or bias is absent.");
  room.def(
      "channel_sums",
      [](GroupNormProblem const& problem, uintptr_t input, uintptr_t sums, int threads) {
        py::gil_scoped_release const release;
        cpu::channel_sums(problem, address<void>(input), address<float>(sums), threads);
      },
      py::arg("problem"), py::arg("input"), py::arg("sums"), py::arg("threads"),
      "Sums of each channel over samples and pixels, in float32. Addresses of dense tensors.");
  room.def(
      "group_norm_gradients",
      [](GroupNormProblem const& problem, uintptr_t grad_output, uintptr_t input, uintptr_t mean,
         uintptr_t rstd, uintptr_t weight, uintptr_t bias, uintptr_t grad_input,
         uintptr_t grad_weight, uintptr_t grad_bias, int threads) {
        cpu::GradientTensors const tensors{.grad_output = address<void>(grad_output),
                                           .input = address<void>(input),
                                           .mean = address<float>(mean),
                                           .rstd = address<float>(rstd),
                                           .weight = address<void>(weight),
                                           .bias = address<void>(bias),
                                           .grad_input = address<void>(grad_input),
                                           .grad_weight = address<float>(grad_weight),
                                           .grad_bias = address<float>(grad_bias)};
        py::gil_scoped_release const release;
        cpu::group_norm_gradients(problem, tensors, threads);
      },
      py::arg("problem"), py::arg("grad_output"), py::arg("input"), py::arg("mean"),
      py::arg("rstd"), py::arg("weight"), py::arg("bias"), py::arg("grad_input"),
      py::arg("grad_weight"), py::arg("grad_bias"), py::arg("threads"),
      "The gradients of it. Addresses of dense tensors; 0 where weight or bias is absent or a "
      "gradient is not wanted.");
  auto const ungrouped_gradients = [](auto function) {
    return [function](GroupNormProblem const& problem, uintptr_t grad_output, uintptr_t input,
                      uintptr_t weight, uintptr_t bias, uintptr_t grad_input, uintptr_t grad_weight,
                      uintptr_t grad_bias, uintptr_t grad_front_bias, int threads) {
      cpu::UngroupedGradients const tensors{.grad_output = address<void>(grad_output),
                                            .input = address<void>(input),
                                            .weight = address<void>(weight),
                                            .bias = address<void>(bias),
                                            .grad_input = address<void>(grad_input),
                                            .grad_weight = address<float>(grad_weight),
                                            .grad_bias = address<float>(grad_bias),
                                            .grad_front_bias = address<float>(grad_front_bias)};
      py::gil_scoped_release const release;
      function(problem, tensors, threads);
    };
  };
  room.def("map_gradients", ungrouped_gradients(&cpu::map_gradients), py::arg("problem"),
           py::arg("grad_output"), py::arg("input"), py::arg("weight"), py::arg("bias"),
           py::arg("grad_input"), py::arg("grad_weight"), py::arg("grad_bias"),
           py::arg("grad_front_bias"), py::arg("threads"),
           "The gradients of activate(), with the sums of the input's by channel. Addresses of "
           "dense tensors; 0 where weight or bias is absent or a gradient is not wanted.");
  room.def("layer_norm_gradients", ungrouped_gradients(&cpu::layer_norm_gradients),
           py::arg("problem"), py::arg("grad_output"), py::arg("input"), py::arg("weight"),
           py::arg("bias"), py::arg("grad_input"), py::arg("grad_weight"), py::arg("grad_bias"),
           py::arg("grad_front_bias"), py::arg("threads"),
           "The gradients of layer_norm(), as those of activate().");
  room.def(
      "fold_batch_norm",
      [](int64_t channels, double eps, DType statistics_dtype, DType affine_dtype, uintptr_t mean,
         uintptr_t variance, uintptr_t weight, uintptr_t bias, uintptr_t scale, uintptr_t shift) {
        cpu::fold_batch_norm({channels, eps, statistics_dtype, affine_dtype, address<void>(mean),
                              address<void>(variance), address<void>(weight), address<void>(bias)},
                             address<float>(scale), address<float>(shift));
      },
      py::arg("channels"), py::arg("eps"), py::arg("statistics_dtype"), py::arg("affine_dtype"),
      py::arg("mean"), py::arg("variance"), py::arg("weight"), py::arg("bias"), py::arg("scale"),
      py::arg("shift"),
      "Scale and shift of a BatchNorm's tensors. Addresses; 0 where weight or bias is absent.");
  room.def(
      "fold_batch_norm_gradients",
      [](int64_t channels, double eps, DType statistics_dtype, DType affine_dtype, uintptr_t mean,
         uintptr_t variance, uintptr_t grad_scale, uintptr_t grad_shift, uintptr_t grad_weight,
         uintptr_t grad_bias) {
        cpu::fold_batch_norm_gradients({channels, eps, statistics_dtype, affine_dtype,
                                        address<void>(mean), address<void>(variance)},
                                       {address<float>(grad_scale), address<float>(grad_shift),
                                        address<void>(grad_weight), address<void>(grad_bias)});
      },
      py::arg("channels"), py::arg("eps"), py::arg("statistics_dtype"), py::arg("affine_dtype"),
      py::arg("mean"), py::arg("variance"), py::arg("grad_scale"), py::arg("grad_shift"),
      py::arg("grad_weight"), py::arg("grad_bias"),
      "Gradients of weight and bias from those of scale and shift. Addresses; 0 where one that is "
      "given is zero, or one is not wanted.");
  room.attr("most_column_stride") = cpu::kMostColumnStride;
  room.def(
      "direct_convolution",
      [](conv::TransposedProblem const& problem, DType dtype, int64_t batch, uintptr_t input,
         uintptr_t weight, uintptr_t bias, uintptr_t output, int threads) {
        py::gil_scoped_release const release;
        cpu::direct_convolution(problem, dtype, batch,
                                {.input = address<void>(input),
                                 .weight = address<float>(weight),
                                 .bias = address<float>(bias),
                                 .output = address<void>(output)},
                                threads);
      },
      py::arg("problem"), py::arg("dtype"), py::arg("batch"), py::arg("input"), py::arg("weight"),
      py::arg("bias"), py::arg("output"), py::arg("threads"),
      "A transposed convolution of few channels a group. Addresses of dense tensors, weight and "
      "bias of float32; 0 where there is no bias.");
  room.def(
      "pixel_shuffle",
      [](conv::TransposedProblem const& problem, DType dtype, int64_t batch, Activation activation,
         uintptr_t input, uintptr_t weight, std::vector<int64_t> const& weight_strides,
         uintptr_t bias, uintptr_t output, int threads) {
        py::gil_scoped_release const release;
        cpu::pixel_shuffle(problem, dtype, batch, activation,
                           {.input = address<void>(input),
                            .weight = address<float>(weight),
                            .weight_strides = weight_strides,
                            .bias = address<float>(bias),
                            .output = address<void>(output)},
                           threads);
      },
      py::arg("problem"), py::arg("dtype"), py::arg("batch"), py::arg("activation"),
      py::arg("input"), py::arg("weight"), py::arg("weight_strides"), py::arg("bias"),
      py::arg("output"), py::arg("threads"),
      "A transposed convolution whose filter is as large as its stride, and an activation. "
      "Addresses of dense tensors in the problem's layout, weight and bias of float32, the weight "
      "with strides of its five axes; 0 where there is no bias.");
  room.def(
      "direct_input_gradient",
      [](conv::TransposedProblem const& problem, DType dtype, int64_t batch, uintptr_t grad_output,
         uintptr_t weight, uintptr_t grad_input, int threads) {
        py::gil_scoped_release const release;
        cpu::direct_input_gradient(problem, dtype, batch,
                                   {.weight = address<float>(weight),
                                    .grad_output = address<void>(grad_output),
                                    .grad_input = address<void>(grad_input)},
                                   threads);
      },
      py::arg("problem"), py::arg("dtype"), py::arg("batch"), py::arg("grad_output"),
      py::arg("weight"), py::arg("grad_input"), py::arg("threads"),
      "The input's gradient of it. Addresses of dense tensors, the weight of float32.");
  room.def(
      "direct_weight_gradient",
      [](conv::TransposedProblem const& problem, DType dtype, int64_t batch, uintptr_t input,
         uintptr_t grad_output, uintptr_t grad_weight, int threads) {
        py::gil_scoped_release const release;
        cpu::direct_weight_gradient(problem, dtype, batch,
                                    {.input = address<void>(input),
                                     .grad_output = address<void>(grad_output),
                                     .grad_weight = address<float>(grad_weight)},
                                    threads);
      },
      py::arg("problem"), py::arg("dtype"), py::arg("batch"), py::arg("input"),
      py::arg("grad_output"), py::arg("grad_weight"), py::arg("threads"),
      "The weight's gradient of it, of float32. Addresses of dense tensors.");
}

}  // namespace fusedconv::binding
