#include "conv/direct/gradients/steps.hpp"

#include "fusedconv/check.hpp"
#include "groupnorm/support.hpp"

namespace fusedconv::conv::direct {
namespace {

void check_whole(char const* step, int64_t batch, RunContext const& context) {
  FUSEDCONV_CHECK(context.samples == batch, step, ": got a batch chunk of ", context.samples,
                  " samples of ", batch);
}

void check_wanted(char const* step, GradientOperands const& operands) {
  FUSEDCONV_CHECK(operands.grad_input.present() || operands.partials.present(), step,
                  ": got neither grad_input nor partials");
}

// "input", "weight" or both.
char const* wanted(GradientOperands const& operands) {
  if (!operands.partials.present()) return "input";
  return operands.grad_input.present() ? "input and weight" : "weight";
}

std::vector<Operand> all_of(GradientOperands const& o) {
  return {o.input, o.grad_output, o.weight, o.grad_input, o.partials};
}

}  // namespace

Gradients::Gradients(GradientConfig const& config, FilterSource const& source,
                     GradientOperands const& operands)
    : config_(config), source_(source), operands_(operands) {
  groupnorm::check_supported("Gradients", config.support);
  check_wanted("Gradients", operands);
}

std::string Gradients::describe() const {
  return detail::join("depthwise gradient of ", wanted(operands_), " (",
                      name_of(config_.problem.layout), ")");
}

std::vector<Operand> Gradients::operands() const { return all_of(operands_); }

void Gradients::run(RunContext const& context, void*) const {
  check_whole("Gradients", config_.batch, context);
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
  check_whole("AddWeightParts", config_.batch, context);
  add_weight_parts(config_, context.at<float const>(partials_), context.at(grad_weight_),
                   context.stream);
}

FewGradients::FewGradients(few::Config const& config, FilterSource const& source,
                           GradientOperands const& operands)
    : config_(config), source_(source), operands_(operands) {
  groupnorm::check_supported("FewGradients", config.support);
  check_wanted("FewGradients", operands);
}

std::string FewGradients::describe() const {
  return detail::join("few-channel gradient of ", wanted(operands_));
}

std::vector<Operand> FewGradients::operands() const { return all_of(operands_); }

void FewGradients::run(RunContext const& context, void*) const {
  check_whole("FewGradients", config_.batch, context);
  few::compute_gradients(config_, source_,
                         {.input = context.at(operands_.input),
                          .grad_output = context.at(operands_.grad_output),
                          .weight = context.at(operands_.weight),
                          .grad_input = context.at(operands_.grad_input),
                          .partials = context.at<float>(operands_.partials)},
                         context.stream);
}

AddFewParts::AddFewParts(few::Config const& config, FilterSource const& target, Operand partials,
                         Operand grad_weight)
    : config_(config), target_(target), partials_(partials), grad_weight_(grad_weight) {
  groupnorm::check_supported("AddFewParts", config.support);
}

std::string AddFewParts::describe() const { return "add the few-channel weight gradient's parts"; }

std::vector<Operand> AddFewParts::operands() const { return {partials_, grad_weight_}; }

void AddFewParts::run(RunContext const& context, void*) const {
  check_whole("AddFewParts", config_.batch, context);
  few::add_parts(config_, target_, context.at<float const>(partials_), context.at(grad_weight_),
                 context.stream);
}

}  // namespace fusedconv::conv::direct
