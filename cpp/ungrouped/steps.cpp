#include "ungrouped/steps.hpp"

#include "fusedconv/check.hpp"
#include "groupnorm/describe.hpp"
#include "groupnorm/support.hpp"

namespace fusedconv::ungrouped {
namespace {

void check_whole(char const* step, GradientConfig const& config, RunContext const& context) {
  FUSEDCONV_CHECK(context.samples == config.problem.batch, step, ": got a batch chunk of ",
                  context.samples, " samples of ", config.problem.batch);
}

char const* name_of(Kind kind) {
  switch (kind) {
    case Kind::kLayer: return "layer norm over channels";
    case Kind::kAffine: return "affine map of channels";
    case Kind::kIdentity: return "";
  }
  return "";
}

}  // namespace

Gradient::Gradient(GradientConfig const& config, GradientOperands const& operands)
    : config_(config), operands_(operands) {
  groupnorm::check_supported("Gradient", config.support);
  FUSEDCONV_CHECK(operands.input.present() == config.reads_input(), "Gradient: got ",
                  operands.input.present() ? "an input" : "no input");
  FUSEDCONV_CHECK(!operands.grad_input.present() || config.reads_input(),
                  "Gradient: got a gradient of the input to fill, which is the output's");
}

std::string Gradient::describe() const {
  using groupnorm::step_name;
  GroupNormProblem const& p = config_.problem;
  if (!config_.reads_input()) {
    return detail::join("sums of the output's gradient by channel (", name_of(p.input_layout), ")");
  }
  return detail::join(
      "gradient through ",
      groupnorm::join_parts(" + ", {step_name(p.activation_after), name_of(config_.kind),
                                    step_name(p.activation_before)}),
      " in one pass (", name_of(p.input_layout), ")",
      groupnorm::has_wide_gradient(p) ? detail::join(", of ", fusedconv::name_of(p.output_dtype))
                                      : "",
      ", + sums by channel");
}

std::vector<Operand> Gradient::operands() const {
  auto const& o = operands_;
  return {o.input, o.grad_output, o.weight, o.bias, o.grad_input, o.partials};
}

void Gradient::run(RunContext const& context, void*) const {
  check_whole("Gradient", config_, context);
  gradient(config_,
           {.input = context.at(operands_.input),
            .grad_output = context.at(operands_.grad_output),
            .weight = context.at(operands_.weight),
            .bias = context.at(operands_.bias),
            .grad_input = context.at(operands_.grad_input),
            .partials = context.at<float>(operands_.partials)},
           context.stream);
}

AddParts::AddParts(GradientConfig const& config, Operand partials, Operand grad_weight,
                   Operand grad_bias, Operand grad_conv_bias)
    : config_(config),
      partials_(partials),
      grad_weight_(grad_weight),
      grad_bias_(grad_bias),
      grad_conv_bias_(grad_conv_bias) {
  groupnorm::check_supported("AddParts", config.support);
  FUSEDCONV_CHECK(grad_weight.present() || grad_bias.present() || grad_conv_bias.present(),
                  "AddParts: got no gradient to fill");
  FUSEDCONV_CHECK(config.kind != Kind::kIdentity || !(grad_weight.present() || grad_bias.present()),
                  "AddParts: got a gradient of norm weight or bias to fill, there is no norm");
}

std::string AddParts::describe() const {
  return detail::join("add sums by channel to gradients of ",
                      groupnorm::join_parts(", ", {grad_weight_.present() ? "norm weight" : "",
                                                   grad_bias_.present() ? "norm bias" : "",
                                                   grad_conv_bias_.present() ? "bias" : ""}));
}

std::vector<Operand> AddParts::operands() const {
  return {partials_, grad_weight_, grad_bias_, grad_conv_bias_};
}

void AddParts::run(RunContext const& context, void*) const {
  check_whole("AddParts", config_, context);
  add_parts(config_, context.at<float const>(partials_),
            {.weight = context.at(grad_weight_),
             .bias = context.at(grad_bias_),
             .conv_bias = context.at(grad_conv_bias_)},
            context.stream);
}

}  // namespace fusedconv::ungrouped
