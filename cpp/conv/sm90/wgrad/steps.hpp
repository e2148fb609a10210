// The steps of the weight gradient. Both take the whole batch, that of the config's problem.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "conv/sm90/wgrad/add_partials.hpp"
#include "conv/sm90/wgrad/rows.hpp"
#include "conv/steps.hpp"
#include "fusedconv/check.hpp"
#include "program/step.hpp"

namespace fusedconv::conv::sm90::wgrad {

inline void check_whole(Config const& config, RunContext const& context) {
  expect<Config, int64_t>(config, "batch", context.samples, config.problem.n);
}

// partials: config.schedule.partial_bytes, for AddPartials.
class SumProducts final : public Step {
 public:
  SumProducts(Config const& config, Operand input, Operand grad_output, Operand partials)
      : config_(served(config)), input_(input), grad_output_(grad_output), partials_(partials) {}

  std::string describe() const override {
    return detail::join(config_.row->name, " (weight gradient, ", config_.schedule.splits,
                        config_.schedule.splits == 1 ? " part)" : " parts)");
  }
  std::vector<Operand> operands() const override { return {input_, grad_output_, partials_}; }
  void run(RunContext const& context, void*) const override {
    check_whole(config_, context);
    config_.row->launch({.config = config_,
                         .input = context.at(input_),
                         .grad_output = context.at(grad_output_),
                         .partials = context.at<float>(partials_)},
                        context.stream);
  }

 private:
  Config config_;
  Operand input_, grad_output_, partials_;
};

// grad_weight: [C, K, T, R, S], contiguous, of the problem's dtype.
class AddPartials final : public Step {
 public:
  AddPartials(Config const& config, Operand partials, Operand grad_weight)
      : config_(served(config)), partials_(partials), grad_weight_(grad_weight) {}

  std::string describe() const override { return "add the weight gradient's parts"; }
  std::vector<Operand> operands() const override { return {partials_, grad_weight_}; }
  void run(RunContext const& context, void*) const override {
    check_whole(config_, context);
    add_partials(config_, context.at<float>(partials_), context.at(grad_weight_), context.stream);
  }

 private:
  Config config_;
  Operand partials_, grad_weight_;
};

}  // namespace fusedconv::conv::sm90::wgrad
