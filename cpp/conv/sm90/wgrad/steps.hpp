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

// partials: config.schedule.partial_bytes, for AddPartials. Operands are rounded, or split where
// that is the mode, on the way to the tensor core.
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

// A contiguous weight [C, K, T, R, S] whose phases' planes are a problem's output channels.
inline FilterSource contiguous_weight(ConvProblem const& p, PhasePlanes const& phases) {
  auto const& [depth, height, width] = phases.axes;
  FilterSource result{.c = p.c,
                      .k = p.k / phases.count(),
                      .t = depth.kernel,
                      .r = height.kernel,
                      .s = width.kernel};
  result.stride_s = 1;
  result.stride_r = result.s;
  result.stride_t = result.r * result.stride_r;
  result.stride_k = result.t * result.stride_t;
  result.stride_c = result.k * result.stride_k;
  return result;
}

// grad_weight: of the problem's dtype; with phases that of the weight whose planes the problem's
// output channels are. It lies as `weight` says, without which it is contiguous [C, K, T, R, S].
class AddPartials final : public Step {
 public:
  AddPartials(Config const& config, Operand partials, Operand grad_weight,
              std::optional<PhasePlanes> const& phases, std::optional<FilterSource> const& weight)
      : config_(served(config)),
        phases_(phases.value_or(
            PhasePlanes::whole(config.problem.t, config.problem.r, config.problem.s))),
        weight_(weight.value_or(contiguous_weight(config.problem, phases_))),
        partials_(partials),
        grad_weight_(grad_weight) {
    ConvProblem const& c = config.problem;
    auto const& [depth, height, width] = phases_.axes;
    expect<Config, int64_t>(config, "output channels modulo phases", c.k % phases_.count(), 0);
    expect<Config, int64_t>(config, "taps of a phase along depth", depth.taps(), c.t);
    expect<Config, int64_t>(config, "taps of a phase along height", height.taps(), c.r);
    expect<Config, int64_t>(config, "taps of a phase along width", width.taps(), c.s);
    FilterSource const whole = contiguous_weight(c, phases_);
    expect<Config, int64_t>(config, "input channels of the weight", weight_.c, whole.c);
    expect<Config, int64_t>(config, "output channels of the weight", weight_.k, whole.k);
    expect<Config, int64_t>(config, "taps along depth", weight_.t, whole.t);
    expect<Config, int64_t>(config, "taps along height", weight_.r, whole.r);
    expect<Config, int64_t>(config, "taps along width", weight_.s, whole.s);
  }

  std::string describe() const override { return "add the weight gradient's parts"; }
  std::vector<Operand> operands() const override { return {partials_, grad_weight_}; }
  void run(RunContext const& context, void*) const override {
    check_whole(config_, context);
    add_partials(config_, phases_, weight_, context.at<float>(partials_), context.at(grad_weight_),
                 context.stream);
  }

 private:
  Config config_;
  PhasePlanes phases_;
  FilterSource weight_;
  Operand partials_, grad_weight_;
};

}  // namespace fusedconv::conv::sm90::wgrad
