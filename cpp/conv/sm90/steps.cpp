#include "conv/sm90/steps.hpp"

#include "conv/sm90/passes.hpp"
#include "fusedconv/check.hpp"
#include "groupnorm/describe.hpp"

namespace fusedconv::conv::sm90 {

Finalize::Finalize(Config const& config, GroupNormProblem const& problem, Operand input,
                   Operand statistics, Operand weight, Operand bias, Operand output,
                   Operand conv_output)
    : config_(served(config)),
      problem_(matching(config, problem)),
      input_(input),
      statistics_(statistics),
      weight_(weight),
      bias_(bias),
      output_(output),
      conv_output_(conv_output) {}

std::string Finalize::describe() const {
  std::string const passes =
      groupnorm::join_parts(" + ", {groupnorm::step_name(problem_.activation_before),
                                    statistics_.present() ? "normalize" : "",
                                    groupnorm::step_name(problem_.activation_after)});
  return detail::join(passes.empty() ? "copy" : passes, " (accumulator order -> ",
                      name_of(problem_.output_layout), ")",
                      conv_output_.present() ? ", and the convolution's output" : "");
}

std::vector<Operand> Finalize::operands() const {
  return {input_, statistics_, weight_, bias_, output_, conv_output_};
}

void Finalize::run(RunContext const& context, void*) const {
  finalize(config_, with_batch(problem_, context.samples),
           {.input = context.at(input_),
            .output = context.at(output_),
            .conv_output = context.at(conv_output_),
            .weight = context.at(weight_),
            .bias = context.at(bias_),
            .statistics = context.at<groupnorm::Statistics>(statistics_)},
           context.stream);
}

}  // namespace fusedconv::conv::sm90
