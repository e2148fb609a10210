// The steps of the weight gradient. Both take the whole batch, that of the config's problem.
#pragma once

#include <cstdint>
#include <optional>
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

// grad_weight: [C, K, T, R, S], contiguous, of the problem's dtype; with phases that of the weight
// whose planes the problem's output channels are.
class AddPartials final : public Step {
 public:
  AddPartials(Config const& config, Operand partials, Operand grad_weight,
              std::optional<PhasePlanes> const& phases)
      : config_(served(config)),
        phases_(phases.value_or(
            PhasePlanes::whole(config.problem.t, config.problem.r, config.problem.s))),
        partials_(partials),
        grad_weight_(grad_weight) {
    ConvProblem const& c = config.problem;
    auto const& [depth, height, width] = phases_.axes;
    expect<Config, int64_t>(config, "output channels modulo phases", c.k % phases_.count(), 0);
    expect<Config, int64_t>(config, "taps of a phase along depth", depth.taps(), c.t);
    expect<Config, int64_t>(config, "taps of a phase along height", height.taps(), c.r);
    expect<Config, int64_t>(config, "taps of a phase along width", width.taps(), c.s);
  }

  std::string describe() const override { return "add the weight gradient's parts"; }
  std::vector<Operand> operands() const override { return {partials_, grad_weight_}; }
  void run(RunContext const& context, void*) const override {
    check_whole(config_, context);
    add_partials(config_, phases_, context.at<float>(partials_), context.at(grad_weight_),
                 context.stream);
  }

 private:
  Config config_;
  PhasePlanes phases_;
  Operand partials_, grad_weight_;
};

}  // namespace fusedconv::conv::sm90::wgrad
