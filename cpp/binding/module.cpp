// The Python module fusedconv._C: tensors arrive as addresses, sizes and strides; no torch here.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "cpu/group_norm.hpp"
#include "fusedconv/check.hpp"
#include "fusedconv/groupnorm.hpp"
#ifdef FUSEDCONV_WITH_CUDA
#include "conv/convolution.hpp"
#include "groupnorm/backward.hpp"
#include "groupnorm/groupnorm.hpp"
#include "groupnorm/resident.hpp"
#include "groupnorm/streamed.hpp"
#include "layout/layout.hpp"
#include "program/device_guard.hpp"
#include "program/program.hpp"
#endif

namespace py = pybind11;

namespace fusedconv {
namespace {

template <class T>
T* address(uintptr_t value) {
  return reinterpret_cast<T*>(value);
}

template <class E>
E checked_enum(char const* name, int value, int count) {
  if (value < 0 || value >= count) {
    throw InvalidArgument(detail::join(name, " is ", value, " (expected 0 to ", count - 1, ")"));
  }
  return static_cast<E>(value);
}

DType dtype_of(char const* name, int value) { return checked_enum<DType>(name, value, 3); }
Layout layout_of(char const* name, int value) { return checked_enum<Layout>(name, value, 2); }
Activation activation_of(char const* name, int value) {
  return checked_enum<Activation>(name, value, 5);
}

GroupNormProblem group_norm_problem(int64_t batch, int64_t channels, int64_t pixels, int64_t groups,
                                    double eps, int layout, int dtype, int affine_dtype,
                                    int activation_before, int activation_after) {
  return {.batch = batch,
          .channels = channels,
          .pixels = pixels,
          .groups = groups,
          .eps = eps,
          .layout = layout_of("layout", layout),
          .dtype = dtype_of("dtype", dtype),
          .affine_dtype = dtype_of("affine_dtype", affine_dtype),
          .activation_before = activation_of("activation_before", activation_before),
          .activation_after = activation_of("activation_after", activation_after)};
}

void bind_cpu(py::module_& m) {
  m.def(
      "cpu_group_norm",
      [](uintptr_t input, uintptr_t output, uintptr_t weight, uintptr_t bias, uintptr_t mean,
         uintptr_t rstd, int64_t batch, int64_t channels, int64_t pixels, int64_t groups,
         double eps, int layout, int dtype, int affine_dtype, int activation_before,
         int activation_after, int threads) {
        auto const problem = group_norm_problem(batch, channels, pixels, groups, eps, layout, dtype,
                                                affine_dtype, activation_before, activation_after);
        GroupNormTensors const tensors{.input = address<void>(input),
                                       .output = address<void>(output),
                                       .weight = address<void>(weight),
                                       .bias = address<void>(bias),
                                       .mean = address<float>(mean),
                                       .rstd = address<float>(rstd)};
        py::gil_scoped_release const release;
        cpu::group_norm(problem, tensors, threads);
      },
      py::arg("input"), py::arg("output"), py::arg("weight"), py::arg("bias"), py::arg("mean"),
      py::arg("rstd"), py::kw_only(), py::arg("batch"), py::arg("channels"), py::arg("pixels"),
      py::arg("groups"), py::arg("eps"), py::arg("layout"), py::arg("dtype"),
      py::arg("affine_dtype"), py::arg("activation_before"), py::arg("activation_after"),
      py::arg("threads"),
      "Activation, GroupNorm, activation on the processor. Addresses of dense tensors; 0 where "
      "weight, bias, mean or rstd is absent.");
}

#ifdef FUSEDCONV_WITH_CUDA

py::dict row_dict(int index, conv::ConvRow const& row) {
  py::dict result;
  result["index"] = index;
  result["name"] = row.name;
  result["family"] = row.family;
  result["architecture"] = row.architecture;
  result["dimensions"] = row.dimensions;
  result["math"] = int(row.math);
  result["dtype"] = int(row.dtype);
  result["tile"] = py::make_tuple(row.tile_m, row.tile_n, row.tile_k);
  result["warps"] = row.warps;
  result["stages"] = row.stages;
  result["alignment"] = row.alignment;
  result["shared_bytes"] = row.shared_bytes;
  result["max_filter_extent"] = row.max_filter_extent;
  result["max_tensor_bytes"] = row.max_tensor_bytes;
  result["teraflops"] = row.teraflops;
  result["longest_sum"] = row.longest_sum;
  result["most_parts"] = row.most_parts;
  return result;
}

using Triple = std::array<int, 3>;

conv::ConvProblem conv_problem(int c, int k, Triple const& input_extent,
                               Triple const& output_extent, Triple const& taps,
                               Triple const& lower_padding, Triple const& dilation) {
  return {.c = c,
          .k = k,
          .d = input_extent[0],
          .h = input_extent[1],
          .w = input_extent[2],
          .z = output_extent[0],
          .p = output_extent[1],
          .q = output_extent[2],
          .t = taps[0],
          .r = taps[1],
          .s = taps[2],
          .lower_padding_d = lower_padding[0],
          .lower_padding_h = lower_padding[1],
          .lower_padding_w = lower_padding[2],
          .dilation_d = dilation[0],
          .dilation_h = dilation[1],
          .dilation_w = dilation[2]};
}

void bind_sm90(py::module_& m) {
  namespace sm90 = conv::sm90;
  m.def(
      "sm90_rows",
      [] {
        py::list result;
        int index = 0;
        for (sm90::Row const& row : sm90::rows()) {
          py::dict fields;
          fields["index"] = index++;
          fields["name"] = row.name;
          fields["math"] = int(row.math);
          fields["dtype"] = int(row.dtype);
          fields["sharing"] = int(row.sharing);
          fields["tile"] = py::make_tuple(sm90::kBlockM * sm90::blocks_m(row.sharing),
                                          sm90::tile_positions(row.math, row.sharing),
                                          sm90::chunk_channels(row.math));
          result.append(fields);
        }
        return result;
      },
      "The compiled Hopper convolutions, as dictionaries; the index is what Sm90Plan takes.");
  py::class_<sm90::Plan>(m, "Sm90Plan",
                         "A Hopper convolution's schedule; obstacle says why it has none.")
      .def(py::init([](int row, int c, int k, Triple const& input_extent,
                       Triple const& output_extent, Triple const& taps, Triple const& lower_padding,
                       Triple const& dilation, int layout, bool aligned, int multiprocessors) {
             FUSEDCONV_CHECK(row >= 0 && row < int(sm90::rows().size()), "Sm90Plan: row is ", row,
                             " of ", sm90::rows().size());
             sm90::Row const& entry = sm90::rows()[row];
             sm90::Plan plan{.row = row,
                             .problem = conv_problem(c, k, input_extent, output_extent, taps,
                                                     lower_padding, dilation),
                             .schedule = {},
                             .layout = layout_of("layout", layout),
                             .multiprocessors = multiprocessors};
             plan.schedule = sm90::schedule_of(plan.problem, entry.math, entry.sharing, plan.layout,
                                               aligned, sm90::kSharedLimit);
             return plan;
           }),
           py::kw_only(), py::arg("row"), py::arg("c"), py::arg("k"), py::arg("input_extent"),
           py::arg("output_extent"), py::arg("taps"), py::arg("lower_padding"), py::arg("dilation"),
           py::arg("layout"), py::arg("aligned"), py::arg("multiprocessors"))
      .def_property_readonly("obstacle", [](sm90::Plan const& p) { return p.schedule.obstacle; })
      .def_property_readonly("strips", [](sm90::Plan const& p) { return p.schedule.strips; })
      .def_property_readonly("tiles",
                             [](sm90::Plan const& p) {
                               sm90::Schedule const& s = p.schedule;
                               return s.tiles * s.strips * s.blocks_k;
                             })
      .def_property_readonly("positions", [](sm90::Plan const& p) { return p.schedule.positions; })
      .def_property_readonly("strip_width",
                             [](sm90::Plan const& p) { return p.schedule.strip_width; })
      .def_property_readonly("pitch_w", [](sm90::Plan const& p) { return p.schedule.pitch_w; })
      .def_property_readonly("pitch_h", [](sm90::Plan const& p) { return p.schedule.pitch_h; })
      .def_property_readonly("linear", [](sm90::Plan const& p) { return p.schedule.linear; })
      .def_property_readonly("stages", [](sm90::Plan const& p) { return p.schedule.stages; })
      .def_property_readonly("stage_rows",
                             [](sm90::Plan const& p) { return p.schedule.stage_rows; })
      .def_property_readonly("lines", [](sm90::Plan const& p) { return p.schedule.lines; })
      .def_property_readonly("stage_taps",
                             [](sm90::Plan const& p) {
                               sm90::Schedule const& s = p.schedule;
                               return s.rows_per_stage * p.problem.s * s.chunks_per_stage;
                             })
      .def_property_readonly("chunks_per_stage",
                             [](sm90::Plan const& p) { return p.schedule.chunks_per_stage; })
      .def_property_readonly("tensor_copies", [](sm90::Plan const& p) { return p.schedule.bulk; })
      .def_property_readonly("scratch_bytes_per_sample", [](sm90::Plan const& p) {
        return sm90::output_bytes(p.problem, p.schedule, sm90::rows()[p.row].math) +
               sm90::partial_bytes(p.problem, p.schedule);
      });
}

void bind_cuda(py::module_& m) {
  m.def(
      "conv_rows",
      [] {
        py::list result;
        int index = 0;
        for (auto const& row : conv::conv_rows()) result.append(row_dict(index++, row));
        return result;
      },
      "The compiled convolution kernels, as dictionaries; the index is what Program takes.");

  py::class_<Operand>(m, "Operand", "Where a step of a Program finds a tensor.").def(py::init<>());

  py::class_<groupnorm::Passes>(m, "GroupNormPasses", "What the GroupNorm passes compute.")
      .def(py::init([](int64_t channels, int64_t pixels, int64_t groups, double eps, int layout,
                       int dtype, int affine_dtype, int activation_before, int activation_after,
                       int64_t row_channels, int output_layout, int output_dtype) {
             return groupnorm::Passes{
                 group_norm_problem(0, channels, pixels, groups, eps, layout, dtype, affine_dtype,
                                    activation_before, activation_after),
                 row_channels, layout_of("output_layout", output_layout),
                 dtype_of("output_dtype", output_dtype)};
           }),
           py::kw_only(), py::arg("channels"), py::arg("pixels"), py::arg("groups"), py::arg("eps"),
           py::arg("layout"), py::arg("dtype"), py::arg("affine_dtype"),
           py::arg("activation_before"), py::arg("activation_after"), py::arg("row_channels"),
           py::arg("output_layout"), py::arg("output_dtype"));

  py::class_<groupnorm::ResidentPlan>(m, "GroupNormResidentPlan",
                                      "How a group stays on chip; obstacle says why it cannot.")
      .def_readonly("obstacle", &groupnorm::ResidentPlan::obstacle)
      .def_readonly("threads", &groupnorm::ResidentPlan::threads);
  m.def("plan_resident", &groupnorm::plan_resident, py::arg("passes"), py::kw_only(),
        py::arg("batch"), py::arg("aligned"));
  py::class_<groupnorm::StreamPlan>(
      m, "GroupNormStreamPlan",
      "How the shared memory of all multiprocessors holds groups; obstacle says why it cannot.")
      .def_readonly("obstacle", &groupnorm::StreamPlan::obstacle)
      .def_property_readonly("blocks",
                             [](groupnorm::StreamPlan const& plan) { return plan.stream.blocks; });
  m.def(
      "plan_streamed",
      [](groupnorm::Passes const& passes, int64_t batch, bool aligned, int device) {
        int count = 0;
        if (cudaGetDeviceCount(&count) != cudaSuccess) cudaGetLastError();
        if (device >= count) return groupnorm::plan_streamed(passes, batch, aligned, -1);
        DeviceGuard const guard(device);
        return groupnorm::plan_streamed(passes, batch, aligned, device);
      },
      py::arg("passes"), py::kw_only(), py::arg("batch"), py::arg("aligned"), py::arg("device"));

  m.def(
      "group_norm_gradient_workspace_bytes",
      [](int device, int64_t batch, int64_t channels, int64_t pixels, int64_t groups, int layout,
         int dtype) {
        DeviceGuard const guard(device);
        return groupnorm::gradient_workspace_bytes(
            group_norm_problem(batch, channels, pixels, groups, 0.0, layout, dtype, 0, 0, 0));
      },
      py::arg("device"), py::kw_only(), py::arg("batch"), py::arg("channels"), py::arg("pixels"),
      py::arg("groups"), py::arg("layout"), py::arg("dtype"));
  m.def(
      "group_norm_gradients",
      [](uintptr_t input, uintptr_t grad_output, uintptr_t mean, uintptr_t rstd, uintptr_t weight,
         uintptr_t bias, uintptr_t grad_input, uintptr_t grad_weight, uintptr_t grad_bias,
         uintptr_t workspace, int device, uintptr_t stream, int64_t batch, int64_t channels,
         int64_t pixels, int64_t groups, int layout, int dtype, int affine_dtype,
         int activation_before, int activation_after) {
        auto const problem = group_norm_problem(batch, channels, pixels, groups, 0.0, layout, dtype,
                                                affine_dtype, activation_before, activation_after);
        groupnorm::GradientTensors const tensors{.input = address<void>(input),
                                                 .grad_output = address<void>(grad_output),
                                                 .mean = address<float>(mean),
                                                 .rstd = address<float>(rstd),
                                                 .weight = address<void>(weight),
                                                 .bias = address<void>(bias),
                                                 .grad_input = address<void>(grad_input),
                                                 .grad_weight = address<float>(grad_weight),
                                                 .grad_bias = address<float>(grad_bias)};
        DeviceGuard const guard(device);
        groupnorm::gradients(problem, tensors, address<void>(workspace),
                             reinterpret_cast<cudaStream_t>(stream));
      },
      py::arg("input"), py::arg("grad_output"), py::arg("mean"), py::arg("rstd"), py::arg("weight"),
      py::arg("bias"), py::arg("grad_input"), py::arg("grad_weight"), py::arg("grad_bias"),
      py::arg("workspace"), py::arg("device"), py::arg("stream"), py::kw_only(), py::arg("batch"),
      py::arg("channels"), py::arg("pixels"), py::arg("groups"), py::arg("layout"),
      py::arg("dtype"), py::arg("affine_dtype"), py::arg("activation_before"),
      py::arg("activation_after"),
      "Gradients of activation, GroupNorm, activation. Addresses of dense tensors; 0 where "
      "absent.");

  py::class_<Program>(m, "Program", "Steps over chunks of a batch, run by one call.")
      .def(py::init<int, int64_t, int64_t>(), py::arg("device"), py::arg("batch"), py::arg("chunk"))
      .def("tensor", &Program::tensor, py::arg("slot"), py::arg("bytes_per_sample"))
      .def("scratch", &Program::scratch, py::arg("bytes_per_sample"), py::arg("bytes") = 0)
      .def(
          "pack_filter",
          [](Program& self, Operand weight, Operand bias, Operand filter, Operand packed_bias,
             int64_t c, int64_t k, Triple const& taps, int64_t padded_c, int64_t padded_k,
             std::array<int64_t, 5> const& strides, int dtype, bool round_tf32) {
            self.pack_filter({.c = c,
                              .k = k,
                              .t = taps[0],
                              .r = taps[1],
                              .s = taps[2],
                              .padded_c = padded_c,
                              .padded_k = padded_k,
                              .stride_c = strides[0],
                              .stride_k = strides[1],
                              .stride_t = strides[2],
                              .stride_r = strides[3],
                              .stride_s = strides[4],
                              .dtype = dtype_of("dtype", dtype),
                              .round_tf32 = round_tf32},
                             weight, bias, filter, packed_bias);
          },
          py::kw_only(), py::arg("weight"), py::arg("bias"), py::arg("filter"),
          py::arg("packed_bias"), py::arg("c"), py::arg("k"), py::arg("taps"), py::arg("padded_c"),
          py::arg("padded_k"), py::arg("strides"), py::arg("dtype"), py::arg("round_tf32"))
      .def(
          "to_channels_last",
          [](Program& self, Operand input, Operand output, int64_t channels,
             int64_t padded_channels, int64_t pixels, int source, int dtype, bool round_tf32) {
            self.to_channels_last({.channels = channels,
                                   .padded_channels = padded_channels,
                                   .pixels = pixels,
                                   .source = layout_of("source", source),
                                   .dtype = dtype_of("dtype", dtype),
                                   .round_tf32 = round_tf32},
                                  input, output);
          },
          py::kw_only(), py::arg("input"), py::arg("output"), py::arg("channels"),
          py::arg("padded_channels"), py::arg("pixels"), py::arg("source"), py::arg("dtype"),
          py::arg("round_tf32"))
      .def(
          "convolution",
          [](Program& self, int row, Operand input, Operand filter, Operand bias, Operand output,
             int c, int k, Triple const& input_extent, Triple const& output_extent,
             Triple const& taps, Triple const& lower_padding, Triple const& dilation,
             int activation) {
            auto const problem =
                conv_problem(c, k, input_extent, output_extent, taps, lower_padding, dilation);
            self.convolution(row, problem, activation_of("activation", activation), input, filter,
                             bias, output);
          },
          py::kw_only(), py::arg("row"), py::arg("input"), py::arg("filter"), py::arg("bias"),
          py::arg("output"), py::arg("c"), py::arg("k"), py::arg("input_extent"),
          py::arg("output_extent"), py::arg("taps"), py::arg("lower_padding"), py::arg("dilation"),
          py::arg("activation"))
      .def(
          "sm90_convolution",
          [](Program& self, conv::sm90::Plan const& plan, groupnorm::Passes const& passes,
             std::array<int64_t, 5> const& strides, int activation, bool activates_output,
             Operand input, Operand weight, Operand bias, Operand statistics, Operand mean,
             Operand rstd, Operand norm_weight, Operand norm_bias, Operand output,
             Operand conv_output) {
            self.sm90_convolution(plan,
                                  {.c = plan.problem.c,
                                   .k = plan.problem.k,
                                   .stride_c = strides[0],
                                   .stride_k = strides[1],
                                   .stride_t = strides[2],
                                   .stride_r = strides[3],
                                   .stride_s = strides[4]},
                                  activation_of("activation", activation), activates_output, passes,
                                  {.input = input,
                                   .weight = weight,
                                   .bias = bias,
                                   .statistics = {statistics, mean, rstd},
                                   .norm_weight = norm_weight,
                                   .norm_bias = norm_bias,
                                   .output = output,
                                   .conv_output = conv_output});
          },
          py::arg("plan"), py::arg("passes"), py::kw_only(), py::arg("strides"),
          py::arg("activation"), py::arg("activates_output"), py::arg("input"), py::arg("weight"),
          py::arg("bias"), py::arg("statistics"), py::arg("mean"), py::arg("rstd"),
          py::arg("norm_weight"), py::arg("norm_bias"), py::arg("output"), py::arg("conv_output"))
      .def("statistics_scratch", &Program::statistics_scratch, py::arg("groups"))
      .def(
          "moments",
          [](Program& self, groupnorm::Passes const& passes, Operand input, Operand statistics,
             Operand mean, Operand rstd) { self.moments(passes, input, {statistics, mean, rstd}); },
          py::arg("passes"), py::kw_only(), py::arg("input"), py::arg("statistics"),
          py::arg("mean"), py::arg("rstd"))
      .def("normalize", &Program::normalize, py::arg("passes"), py::kw_only(), py::arg("input"),
           py::arg("statistics"), py::arg("weight"), py::arg("bias"), py::arg("output"))
      .def("normalize_resident", &Program::normalize_resident, py::arg("plan"), py::arg("passes"),
           py::kw_only(), py::arg("input"), py::arg("mean"), py::arg("rstd"), py::arg("weight"),
           py::arg("bias"), py::arg("output"))
      .def("normalize_streamed", &Program::normalize_streamed, py::arg("plan"), py::arg("passes"),
           py::kw_only(), py::arg("input"), py::arg("mean"), py::arg("rstd"), py::arg("weight"),
           py::arg("bias"), py::arg("output"))
      .def_property_readonly("workspace_bytes", &Program::workspace_bytes)
      .def_property_readonly("chunk", &Program::chunk)
      .def("run", &Program::run, py::arg("pointers"), py::arg("workspace"), py::arg("stream"),
           "Launches every step on the stream. Does not synchronise.");
}

#endif

}  // namespace
}  // namespace fusedconv

PYBIND11_MODULE(_C, m) {
  using namespace fusedconv;
  m.doc() = "Compiled kernels of fusedconv.";

  static py::exception<KernelFailure> const kernel_error(m, "KernelError", PyExc_RuntimeError);
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (InvalidArgument const& error) {
      PyErr_SetString(PyExc_ValueError, error.what());
    } catch (KernelFailure const& error) {
      PyErr_SetString(kernel_error.ptr(), error.what());
    }
  });

  py::dict build;
  build["version"] = FUSEDCONV_VERSION;
#ifdef __VERSION__
  build["compiler"] = __VERSION__;
#endif
#ifdef _OPENMP
  build["openmp"] = true;
#else
  build["openmp"] = false;
#endif
#ifdef FUSEDCONV_WITH_CUDA
  build["cuda"] = true;
  build["cuda_runtime"] = CUDART_VERSION;
  build["architectures"] = FUSEDCONV_CUDA_ARCHITECTURES;
  build["cutlass"] = FUSEDCONV_CUTLASS_VERSION;
  bind_cuda(m);
  bind_sm90(m);
#else
  build["cuda"] = false;
#endif
  m.attr("build") = build;
  bind_cpu(m);
}
