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

// As PackFilter, of a weight whose convolution's phases are the config's input channels, and whose
// channel axes are swapped.
class PackPhases final : public Step {
 public:
  PackPhases(Config const& config, FilterSource const& source, PhasePlanes const& phases,
             Operand weight, Operand filter)
      : config_(served(config)),
        source_(source),
        phases_(phases),
        weight_(weight),
        filter_(filter) {
    ConvProblem const& c = config.problem;
    auto const& [depth, height, width] = phases.axes;
    expect<Config, int64_t>(config, "input channels of all phases", source.c * phases.count(), c.c);
    expect<Config, int64_t>(config, "output channels of the weight", source.k, c.k);
    expect<Config, int64_t>(config, "taps of a phase along depth", depth.taps(), c.t);
    expect<Config, int64_t>(config, "taps of a phase along height", height.taps(), c.r);
    expect<Config, int64_t>(config, "taps of a phase along width", width.taps(), c.s);
  }

  std::string describe() const override { return "pack filter by phases"; }
  std::vector<Operand> operands() const override { return {weight_, filter_}; }
  void run(RunContext const& context, void*) const override {
    pack_phases(config_, source_, phases_, context.at(weight_), context.at(filter_),
                context.stream);
  }

 private:
  Config config_;
  FilterSource source_;
  PhasePlanes phases_;
  Operand weight_, filter_;
};

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
    expect(config, "phases", config.phases.all(), 1);
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
                       .partials = context.at<TilePartial>(partials_),
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
