// The steps that only these convolutions have.
#pragma once

#include <string>
#include <vector>

#include "conv/sm90/runs/passes.hpp"
#include "conv/sm90/runs/rows.hpp"
#include "conv/steps.hpp"
#include "fusedconv/check.hpp"
#include "fusedconv/groupnorm.hpp"
#include "fusedconv/types.hpp"
#include "groupnorm/describe.hpp"
#include "program/step.hpp"

namespace fusedconv::conv::sm90::runs {

// Statistics from partial moments and normalisation in one pass. problem.batch is the run's. mean
// and rstd may be absent, and so may weight and bias.
class NormalizeMerging final : public Step {
 public:
  NormalizeMerging(Config const& config, GroupNormProblem const& problem, Operand input,
                   Operand partials, Operand mean, Operand rstd, Operand weight, Operand bias,
                   Operand output)
      : config_(served(config)),
        problem_(matching(config, problem)),
        input_(input),
        partials_(partials),
        mean_(mean),
        rstd_(rstd),
        weight_(weight),
        bias_(bias),
        output_(output) {
    expect<Config, std::string>(config, "input layout", name_of(problem.input_layout),
                                name_of(Layout::kChannelsFirst));
    expect<Config, std::string>(config, "output layout", name_of(problem.output_layout),
                                name_of(Layout::kChannelsFirst));
  }

  std::string describe() const override {
    return groupnorm::join_parts(
        " + ", {"merge moments", groupnorm::step_name(problem_.activation_before), "normalize",
                groupnorm::step_name(problem_.activation_after)});
  }
  std::vector<Operand> operands() const override {
    return {input_, partials_, mean_, rstd_, weight_, bias_, output_};
  }
  void run(RunContext const& context, void*) const override {
    normalize_merging(config_, with_batch(problem_, context.samples),
                      {.input = context.at(input_),
                       .output = context.at(output_),
                       .weight = context.at(weight_),
                       .bias = context.at(bias_),
                       .partials = context.at<groupnorm::Partial>(partials_),
                       .mean = context.at<float>(mean_),
                       .rstd = context.at<float>(rstd_)},
                      context.stream);
  }

 private:
  Config config_;
  GroupNormProblem problem_;
  Operand input_, partials_, mean_, rstd_, weight_, bias_, output_;
};

}  // namespace fusedconv::conv::sm90::runs
