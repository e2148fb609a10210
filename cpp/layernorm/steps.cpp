#include "layernorm/steps.hpp"

#include "groupnorm/describe.hpp"
#include "layernorm/layer_norm.hpp"

namespace fusedconv::layernorm {

Normalize::Normalize(GroupNormProblem const& problem, Operand input, Operand weight, Operand bias,
                     Operand output)
    : problem_(problem), input_(input), weight_(weight), bias_(bias), output_(output) {
  check(problem);
}

std::string Normalize::describe() const {
  using groupnorm::step_name;
  return detail::join(
      groupnorm::join_parts(" + ", {step_name(problem_.activation_before), "layer norm",
                                    step_name(problem_.activation_after)}),
      " over channels in one pass (", name_of(problem_.input_layout), ")");
}

std::vector<Operand> Normalize::operands() const { return {input_, weight_, bias_, output_}; }

void Normalize::run(RunContext const& context, void*) const {
  GroupNormProblem problem = problem_;
  problem.batch = context.samples;
  layer_norm(problem,
             {.input = context.at(input_),
              .output = context.at(output_),
              .weight = context.at(weight_),
              .bias = context.at(bias_)},
             context.stream);
}

}  // namespace fusedconv::layernorm
