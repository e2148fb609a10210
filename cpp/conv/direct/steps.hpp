// What conv/steps.hpp asks of this kind of convolution, and the step that normalises as well.
#pragma once

#include <string>
#include <vector>

#include "conv/direct/rows.hpp"
#include "conv/steps.hpp"

namespace fusedconv::conv {

template <>
struct PartialOf<direct::Config> {
  using Type = direct::CountedPartial;
};

namespace direct {

// Convolution, bias, activation, a normalisation by statistics that are known, activation: where
// the convolution costs less than writing its output and reading it again, it is computed once for
// the moments, which writes nothing, and once more here. problem: from the activated values on.
class ConvolveNormalize final : public Step {
 public:
  ConvolveNormalize(Config const& config, Activation activation, GroupNormProblem const& problem,
                    Operand input, Operand filter, Operand bias, Operand statistics, Operand weight,
                    Operand norm_bias, Operand output)
      : config_(served(config)),
        activation_(activation),
        problem_(matching(config, problem)),
        input_(input),
        filter_(filter),
        bias_(bias),
        statistics_(statistics),
        weight_(weight),
        norm_bias_(norm_bias),
        output_(output) {
    expect<Config, std::string>(config, "output dtype", name_of(problem.output_dtype),
                                name_of(config.traits().dtype));
  }

  std::string describe() const override {
    return groupnorm::join_parts(
        " + ", {detail::join(config_.row->name, " (", config_.reads(), ")"),
                bias_.present() ? "bias" : "", groupnorm::step_name(activation_), "normalize",
                groupnorm::step_name(problem_.activation_after)});
  }
  std::vector<Operand> operands() const override {
    return {input_, filter_, bias_, statistics_, weight_, norm_bias_, output_};
  }
  void run(RunContext const& context, void*) const override {
    config_.row->launch({.config = config_,
                         .batch = int(context.samples),
                         .activation = activation_,
                         .input = context.at(input_),
                         .filter = context.at(filter_),
                         .bias = context.at(bias_),
                         .output = context.at(output_),
                         .norm = &problem_,
                         .statistics = context.at<groupnorm::Statistics>(statistics_),
                         .norm_weight = context.at(weight_),
                         .norm_bias = context.at(norm_bias_)},
                        context.stream);
  }

 private:
  Config config_;
  Activation activation_;
  GroupNormProblem problem_;
  Operand input_, filter_, bias_, statistics_, weight_, norm_bias_, output_;
};

}  // namespace direct
}  // namespace fusedconv::conv
