#include "conv/direct/gradients/steps.hpp"

#include "fusedconv/check.hpp"
#include "groupnorm/support.hpp"

namespace fusedconv::conv::direct {
namespace {

void check_whole(char const* step, GradientConfig const& config, RunContext const& context) {
  FUSEDCONV_CHECK(context.samples == config.batch, step, ": got a batch chunk of ", context.samples,
                  " samples of ", config.batch);
}

}  // namespace

Gradients::Gradients(GradientConfig const& config, FilterSource const& source,
                     GradientOperands const& operands)
    : config_(config), source_(source), operands_(operands) {
  groupnorm::check_supported("Gradients", config.support);
  FUSEDCONV_CHECK(operands.grad_input.present() || operands.partials.present(),
                  "Gradients: got neither grad_input nor partials");
}

std::string Gradients::describe() const {
  bool const input = operands_.grad_input.present(), weight = operands_.partials.present();
  return detail::join("depthwise gradient of ", input ? "input" : "",
                      input && weight ? " and weight"
                      : weight        ? "weight"
                                      : "",
                      " (", name_of(config_.problem.layout), ")");
}

std::vector<Operand> Gradients::operands() const {
  auto const& o = operands_;
  return {o.input, o.grad_output, o.weight, o.grad_input, o.partials};
}

void Gradients::run(RunContext const& context, void*) const {
  check_whole("Gradients", config_, context);
  depthwise_gradients(config_, source_,
                      {.input = context.at(operands_.input),
                       .grad_output = context.at(operands_.grad_output),
                       .weight = context.at(operands_.weight),
                       .grad_input = context.at(operands_.grad_input),
                       .partials = context.at<float>(operands_.partials)},
                      context.stream);
}

AddWeightParts::AddWeightParts(GradientConfig const& config, Operand partials, Operand grad_weight)
    : config_(config), partials_(partials), grad_weight_(grad_weight) {
  groupnorm::check_supported("AddWeightParts", config.support);
}

std::string AddWeightParts::describe() const { return "add the depthwise weight gradient's parts"; }

std::vector<Operand> AddWeightParts::operands() const { return {partials_, grad_weight_}; }

void AddWeightParts::run(RunContext const& context, void*) const {
  check_whole("AddWeightParts", config_, context);
  add_weight_parts(config_, context.at<float const>(partials_), context.at(grad_weight_),
                   context.stream);
}

}  // namespace fusedconv::conv::direct
