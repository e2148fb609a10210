// GroupNorm on the GPU: configs and steps, forward and backward.
#include <pybind11/stl.h>

#include <memory>
#include <string>

#include "binding/binding.hpp"
#include "groupnorm/gradient_steps.hpp"
#include "groupnorm/steps.hpp"

namespace fusedconv::binding {
namespace {

using namespace groupnorm;

template <class S>
using StepClass = py::class_<S, Step, std::shared_ptr<S>>;

void bind_two_pass(py::module_& room) {
  room.attr("most_partials") = kMostPartials;
  room.def("statistics_bytes", &statistics_bytes, py::arg("groups"),
           "Bytes of a sample's statistics, between Moments and Normalize.");
  StepClass<Moments>(room, "Moments", "Activation, and the statistics of each group.")
      .def(py::init<GroupNormProblem const&, Operand, Operand, Operand, Operand>(), py::kw_only(),
           py::arg("problem"), py::arg("input"), py::arg("statistics"), py::arg("mean"),
           py::arg("rstd"));
  StepClass<Normalize>(room, "Normalize",
                       "Activation, normalisation where there are statistics, activation.")
      .def(py::init<GroupNormProblem const&, Operand, Operand, Operand, Operand, Operand,
                    std::string>(),
           py::kw_only(), py::arg("problem"), py::arg("input"), py::arg("statistics"),
           py::arg("weight"), py::arg("bias"), py::arg("output"), py::arg("name") = "");
}

// A step that takes a config, the problem and the operands of OnePass.
template <class S, class Config>
void bind_one_pass_step(py::module_& room, char const* name, char const* doc) {
  StepClass<S>(room, name, doc)
      .def(py::init([](Config const& config, GroupNormProblem const& problem, Operand input,
                       Operand mean, Operand rstd, Operand weight, Operand bias, Operand output) {
             return std::make_shared<S>(config, problem,
                                        OnePass::Operands{.input = input,
                                                          .mean = mean,
                                                          .rstd = rstd,
                                                          .weight = weight,
                                                          .bias = bias,
                                                          .output = output});
           }),
           py::arg("config"), py::kw_only(), py::arg("problem"), py::arg("input"), py::arg("mean"),
           py::arg("rstd"), py::arg("weight"), py::arg("bias"), py::arg("output"));
}

void bind_one_pass(py::module_& room) {
  py::class_<ResidentConfig>(room, "ResidentConfig", "How a group stays in registers.")
      .def_readonly("support", &ResidentConfig::support)
      .def_readonly("threads", &ResidentConfig::threads);
  room.def("resident_config", &resident_config, py::arg("problem"), py::kw_only(),
           py::arg("aligned"), "aligned: addresses are multiples of 16 bytes.");
  bind_one_pass_step<NormalizeResident, ResidentConfig>(
      room, "NormalizeResident", "GroupNorm with each group in the registers of a block.");

  py::class_<StreamedConfig>(room, "StreamedConfig",
                             "How the shared memory of all multiprocessors holds groups.")
      .def_readonly("support", &StreamedConfig::support)
      .def_readonly("in_halves", &StreamedConfig::in_halves)
      .def_property_readonly(
          "blocks", [](StreamedConfig const& config) { return config.stream.blocks; },
          "Of a team, each of which has units of its own.")
      .def_property_readonly("teams",
                             [](StreamedConfig const& config) { return config.stream.teams; });
  room.def("streamed_config", &streamed_config, py::arg("problem"), py::kw_only(),
           py::arg("aligned"), py::arg("device"), py::arg("saves"),
           "aligned: addresses are multiples of 16 bytes; saves: gradients follow.");
  bind_one_pass_step<NormalizeStreamed, StreamedConfig>(
      room, "NormalizeStreamed", "GroupNorm with the groups in hand in all shared memory.");
}

void bind_gradient_configs(py::module_& room) {
  py::class_<GradientBuffers>(room, "GradientBuffers",
                              "What the steps of a backward pass leave for each other, in bytes.")
      .def_readonly("support", &GradientBuffers::support)
      .def_readonly("partial_bytes", &GradientBuffers::partial_bytes)
      .def_readonly("sum_bytes", &GradientBuffers::sum_bytes)
      .def_readonly("term_bytes", &GradientBuffers::term_bytes)
      .def_readonly("channel_sums", &GradientBuffers::channel_sums,
                    "Parts of a channel of a sample in the sums of the input's gradient.");
  py::class_<GradientConfig, GradientBuffers>(room, "GradientConfig", "Gradients in two passes.");
  py::class_<StreamedGradientConfig, GradientBuffers>(room, "StreamedGradientConfig",
                                                      "Gradients in one pass.")
      .def_property_readonly("blocks", [](StreamedGradientConfig const& config) {
        return config.streamed.stream.blocks;
      });
  room.def("gradient_sums_config", &gradient_sums_config, py::arg("problem"),
           py::arg("in_lines") = false);
  room.def("streamed_gradient_config", &streamed_gradient_config, py::arg("problem"), py::kw_only(),
           py::arg("aligned"), py::arg("columns") = 0, py::arg("pitch") = 0, py::arg("device"),
           "aligned: addresses are multiples of 16 bytes. columns, pitch: of the lines that the "
           "result goes to, in elements; 0 where it is dense.");
}

void bind_gradients(py::module_& room) {
  StepClass<GradientSums>(room, "GradientSums", "Partial sums that the gradients need.")
      .def(py::init([](GradientConfig const& config, GroupNormProblem const& problem, Operand input,
                       Operand grad_output, Operand mean, Operand rstd, Operand weight,
                       Operand bias, Operand partials) {
             return std::make_shared<GradientSums>(
                 config, problem, GradientOperands{input, grad_output, mean, rstd, weight, bias},
                 partials);
           }),
           py::arg("config"), py::kw_only(), py::arg("problem"), py::arg("input"),
           py::arg("grad_output"), py::arg("mean"), py::arg("rstd"), py::arg("weight"),
           py::arg("bias"), py::arg("partials"));
  StepClass<StreamedGradients>(room, "StreamedGradients",
                               "The input's gradient, and the partial sums.")
      .def(py::init([](StreamedGradientConfig const& config, GroupNormProblem const& problem,
                       Operand input, Operand grad_output, Operand mean, Operand rstd,
                       Operand weight, Operand bias, Operand grad_input, int columns, int pitch,
                       Operand sums, Operand partials) {
             return std::make_shared<StreamedGradients>(
                 config, problem, GradientOperands{input, grad_output, mean, rstd, weight, bias},
                 GradientResult{grad_input, columns, pitch, sums}, partials);
           }),
           py::arg("config"), py::kw_only(), py::arg("problem"), py::arg("input"),
           py::arg("grad_output"), py::arg("mean"), py::arg("rstd"), py::arg("weight"),
           py::arg("bias"), py::arg("grad_input"), py::arg("columns") = 0, py::arg("pitch") = 0,
           py::arg("sums") = Operand{}, py::arg("partials"));
  StepClass<MergeGradientSums>(room, "MergeGradientSums", "Sums of each channel, terms of a group.")
      .def(py::init<GradientBuffers const&, GroupNormProblem const&, Operand, Operand, Operand,
                    Operand>(),
           py::arg("config"), py::kw_only(), py::arg("problem"), py::arg("weight"),
           py::arg("partials"), py::arg("sums"), py::arg("terms"));
  StepClass<AffineGradients>(room, "AffineGradients",
                             "The gradients of weight and bias, and of a convolution's bias.")
      .def(py::init([](GroupNormProblem const& problem, Operand sums, Operand grad_weight,
                       Operand grad_bias, Operand channel_sums, int parts, Operand grad_conv_bias) {
             return std::make_shared<AffineGradients>(
                 problem, sums, grad_weight, grad_bias,
                 ConvBias{channel_sums, parts, grad_conv_bias});
           }),
           py::kw_only(), py::arg("problem"), py::arg("sums"), py::arg("grad_weight"),
           py::arg("grad_bias"), py::arg("channel_sums") = Operand{}, py::arg("parts") = 0,
           py::arg("grad_conv_bias") = Operand{});
  StepClass<InputGradient>(room, "InputGradient", "The input's gradient.")
      .def(
          py::init([](GradientConfig const& config, GroupNormProblem const& problem, Operand input,
                      Operand grad_output, Operand mean, Operand rstd, Operand weight, Operand bias,
                      Operand terms, Operand grad_input, int columns, int pitch, Operand sums) {
            return std::make_shared<InputGradient>(
                config, problem, GradientOperands{input, grad_output, mean, rstd, weight, bias},
                terms, GradientResult{grad_input, columns, pitch, sums});
          }),
          py::arg("config"), py::kw_only(), py::arg("problem"), py::arg("input"),
          py::arg("grad_output"), py::arg("mean"), py::arg("rstd"), py::arg("weight"),
          py::arg("bias"), py::arg("terms"), py::arg("grad_input"), py::arg("columns") = 0,
          py::arg("pitch") = 0, py::arg("sums") = Operand{});
}

}  // namespace

void bind_group_norm(py::module_& m) {
  py::module_ room = m.def_submodule("group_norm", "GroupNorm on the GPU.");
  bind_two_pass(room);
  bind_one_pass(room);
  bind_gradient_configs(room);
  bind_gradients(room);
}

}  // namespace fusedconv::binding
