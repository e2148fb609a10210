// Enums, problems and what a kernel's configuration depends on.
#include <pybind11/native_enum.h>
#include <pybind11/stl.h>

#include <array>
#include <cstddef>
#include <optional>
#include <utility>

#include "binding/binding.hpp"
#include "conv/math_table.hpp"
#include "conv/phase_planes.hpp"
#include "conv/problem.hpp"
#include "conv/transposed.hpp"
#include "fusedconv/activation.hpp"
#include "fusedconv/device.hpp"
#include "fusedconv/groupnorm.hpp"
#include "fusedconv/support.hpp"
#include "fusedconv/types.hpp"

namespace fusedconv::binding {
namespace {

template <class E>
void bind_enum(py::module_& m, char const* name, char const* doc) {
  py::native_enum<E> native(m, name, "enum.Enum", doc);
  for (std::size_t i = 0; i < kNames<E>.size(); ++i) {
    native.value(kNames<E>[i], static_cast<E>(i));
  }
  native.finalize();
}

void bind_enums(py::module_& m) {
  bind_enum<DType>(m, "DType", "Element types, by torch's names.");
  bind_enum<Layout>(m, "Layout", "Where the channel axis lies, whatever the number of axes.");
  bind_enum<Activation>(m, "Activation", "Functions of one element.");
  bind_enum<conv::Math>(m, "Math", "How a convolution's products are formed.");
}

void bind_math(py::module_& m) {
  using conv::MathTraits;
  py::class_<MathTraits>(m, "MathTraits", "What follows from a Math.")
      .def_property_readonly("name", [](MathTraits const& traits) { return traits.name; })
      .def_property_readonly("precision", [](MathTraits const& traits) { return traits.precision; })
      .def_readonly("dtype", &MathTraits::dtype);
  m.def("math_traits", &conv::traits_of, py::arg("math"), py::return_value_policy::reference);
}

void bind_device(py::module_& m) {
  py::class_<Support>(m, "Support", "Whether a kernel serves a problem, and why not.")
      .def_readonly("reason", &Support::reason)
      .def("__bool__", [](Support const& support) { return bool(support); });
  py::class_<Device>(m, "Device", "What a kernel's configuration depends on of a device.")
      .def(py::init([](int architecture, int multiprocessors, int shared_bytes, int64_t l2_bytes,
                       double dram_bytes_per_second) {
             return Device{architecture, multiprocessors, shared_bytes, l2_bytes,
                           dram_bytes_per_second};
           }),
           py::kw_only(), py::arg("architecture"), py::arg("multiprocessors"),
           py::arg("shared_bytes"), py::arg("l2_bytes"), py::arg("dram_bytes_per_second"))
      .def_readonly("architecture", &Device::architecture)
      .def_readonly("multiprocessors", &Device::multiprocessors)
      .def_readonly("shared_bytes", &Device::shared_bytes)
      .def_readonly("l2_bytes", &Device::l2_bytes)
      .def_readonly("dram_bytes_per_second", &Device::dram_bytes_per_second);
}

void bind_group_norm_problem(py::module_& m) {
  using Problem = GroupNormProblem;
  py::class_<Problem>(m, "GroupNormProblem", "Activation, GroupNorm, activation of one tensor.")
      .def(py::init([](int64_t batch, int64_t channels, int64_t pixels, int64_t groups, double eps,
                       Layout input_layout, Layout output_layout, DType dtype, DType output_dtype,
                       DType affine_dtype, Activation activation_before,
                       Activation activation_after, int64_t row_channels, bool tf32) {
             return Problem{.batch = batch,
                            .channels = channels,
                            .pixels = pixels,
                            .groups = groups,
                            .eps = eps,
                            .input_layout = input_layout,
                            .output_layout = output_layout,
                            .dtype = dtype,
                            .output_dtype = output_dtype,
                            .affine_dtype = affine_dtype,
                            .activation_before = activation_before,
                            .activation_after = activation_after,
                            .row_channels = row_channels,
                            .tf32 = tf32};
           }),
           py::kw_only(), py::arg("batch") = 0, py::arg("channels"), py::arg("pixels"),
           py::arg("groups") = 1, py::arg("eps") = 0.0, py::arg("input_layout"),
           py::arg("output_layout"), py::arg("dtype"), py::arg("output_dtype"),
           py::arg("affine_dtype"), py::arg("activation_before"), py::arg("activation_after"),
           py::arg("row_channels") = 0, py::arg("tf32") = false)
      .def_property_readonly("quick", &Problem::quick);
}

void bind_convolution_problem(py::module_& m) {
  using conv::ConvProblem;
  using conv::FilterSource;
  using Extents = std::array<int, 3>;
  py::class_<ConvProblem>(m, "ConvProblem",
                          "A forward convolution of stride 1; extents by depth, height, width.")
      .def(py::init([](int c, int k, Extents const& input, Extents const& output,
                       Extents const& taps, Extents const& lower_padding, Extents const& dilation) {
             return ConvProblem{.c = c,
                                .k = k,
                                .d = input[0],
                                .h = input[1],
                                .w = input[2],
                                .z = output[0],
                                .p = output[1],
                                .q = output[2],
                                .t = taps[0],
                                .r = taps[1],
                                .s = taps[2],
                                .lower_padding_d = lower_padding[0],
                                .lower_padding_h = lower_padding[1],
                                .lower_padding_w = lower_padding[2],
                                .dilation_d = dilation[0],
                                .dilation_h = dilation[1],
                                .dilation_w = dilation[2]};
           }),
           py::kw_only(), py::arg("c"), py::arg("k"), py::arg("input"), py::arg("output"),
           py::arg("taps"), py::arg("lower_padding"), py::arg("dilation"));
  using conv::TransposedProblem;
  py::class_<TransposedProblem>(
      m, "TransposedProblem",
      "A transposed convolution; channels are those of one group, extents by depth, height, width.")
      .def(py::init([](int channels, int output_channels, int groups, Extents const& input,
                       Extents const& output, Extents const& kernel, Extents const& stride,
                       Extents const& padding, Extents const& dilation, Layout layout,
                       bool aligned) {
             TransposedProblem problem{.channels = channels,
                                       .output_channels = output_channels,
                                       .groups = groups,
                                       .axes = {},
                                       .layout = layout,
                                       .aligned = aligned};
             for (int i = 0; i < conv::kMaxAxes; ++i) {
               problem.axes[i] = {.input = input[i],
                                  .output = output[i],
                                  .kernel = kernel[i],
                                  .stride = stride[i],
                                  .padding = padding[i],
                                  .dilation = dilation[i]};
             }
             return problem;
           }),
           py::kw_only(), py::arg("channels"), py::arg("output_channels"), py::arg("groups"),
           py::arg("input"), py::arg("output"), py::arg("kernel"), py::arg("stride"),
           py::arg("padding"), py::arg("dilation"), py::arg("layout"), py::arg("aligned"));
  py::class_<FilterSource>(
      m, "FilterSource", "A transposed convolution's weight [C, K, T, R, S]; strides in elements.")
      .def(py::init([](int64_t c, int64_t k, std::array<int64_t, 3> const& taps,
                       std::array<int64_t, 5> const& strides) {
             return FilterSource{.c = c,
                                 .k = k,
                                 .t = taps[0],
                                 .r = taps[1],
                                 .s = taps[2],
                                 .stride_c = strides[0],
                                 .stride_k = strides[1],
                                 .stride_t = strides[2],
                                 .stride_r = strides[3],
                                 .stride_s = strides[4]};
           }),
           py::kw_only(), py::arg("c"), py::arg("k"), py::arg("taps"), py::arg("strides"));
  using conv::PhasePlanes;
  py::class_<PhasePlanes>(m, "PhasePlanes",
                          "How a strided transposed convolution's output lies in planes of its "
                          "stride's phases; extents by depth, height, width.")
      .def(py::init([](Extents const& kernel, Extents const& stride, Extents const& padding,
                       Extents const& dilation) {
             PhasePlanes result;
             for (int i = 0; i < conv::kMaxAxes; ++i) {
               result.axes[i] = {.kernel = kernel[i],
                                 .stride = stride[i],
                                 .padding = padding[i],
                                 .dilation = dilation[i]};
             }
             return result;
           }),
           py::kw_only(), py::arg("kernel"), py::arg("stride"), py::arg("padding"),
           py::arg("dilation"))
      .def_property_readonly("count", &PhasePlanes::count, "Of one channel.")
      .def(
          "source",
          [](PhasePlanes const& planes, int channel,
             Extents const& taps) -> std::optional<std::pair<int, Extents>> {
            auto const found = planes.source(channel, taps[0], taps[1], taps[2]);
            if (!found.exists()) return std::nullopt;
            return std::pair{found.channel, Extents{found.t, found.r, found.s}};
          },
          py::arg("channel"), py::arg("taps"),
          "The weight's channel and taps that a plane's are; None where there are no such taps.");
}

}  // namespace

void bind_types(py::module_& m) {
  bind_enums(m);
  bind_math(m);
  bind_device(m);
  bind_group_norm_problem(m);
  bind_convolution_problem(m);
}

}  // namespace fusedconv::binding
