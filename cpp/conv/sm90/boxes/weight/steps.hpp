// The steps of the weight gradient. All take the whole batch, that of the config.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "conv/sm90/boxes/weight/add_partials.hpp"
#include "conv/sm90/boxes/weight/pack_input.hpp"
#include "conv/sm90/boxes/weight/rows.hpp"
#include "conv/steps.hpp"
#include "program/step.hpp"

namespace fusedconv::conv::sm90::boxes::weight {

inline void check_whole(Config const& config, RunContext const& context) {
  expect<Config, int64_t>(config, "batch", context.samples, config.batch);
}

// packed: config.schedule.packed_bytes, for SumProducts of rows that pack.
class PackInput final : public Step {
 public:
  PackInput(Config const& config, Operand input, Operand packed)
      : config_(served(config)), input_(input), packed_(packed) {
    expect(config, "whether the input is packed", config.row->block.packs(), true);
  }

  std::string describe() const override { return "pack the input (rounded to TF32)"; }
  std::vector<Operand> operands() const override { return {input_, packed_}; }
  void run(RunContext const& context, void*) const override {
    check_whole(config_, context);
    pack_input(config_, context.at(input_), context.at(packed_), context.stream);
  }

 private:
  Config config_;
  Operand input_, packed_;
};

// input: packed, where the config has packed_bytes. partials: config.schedule.partial_bytes, for
// AddPartials; or else grad_weight, which lies as a weight that the config writes. bias_sums:
// absent, or of bias_channels the config's bias_parts each, for layout::AddSums, where the config
// sums_bias.
class SumProducts final : public Step {
 public:
  SumProducts(Config const& config, Operand input, Operand grad_output, Operand partials,
              FilterSource const& target, Operand grad_weight, Operand bias_sums, int bias_channels)
      : config_(served(config)),
        input_(input),
        grad_output_(grad_output),
        partials_(partials),
        target_(matching(config, target)),
        grad_weight_(grad_weight),
        bias_sums_(bias_sums),
        bias_channels_(bias_channels) {
    expect(config, "whether there are partials, beside grad_weight", partials.present(),
           !grad_weight.present());
    if (grad_weight.present()) {
      expect(config, "whether the weight's gradient is written", config.writes(target), true);
    }
    if (bias_sums.present()) {
      expect(config, "whether the bias's gradient is summed", config.sums_bias(), true);
      expect_channels(config, "channels of the bias", bias_channels, config.problem.channels);
    }
  }

  std::string describe() const override {
    std::string const parts = partials_.present()
                                  ? detail::join(config_.schedule.splits,
                                                 config_.schedule.splits == 1 ? " part" : " parts")
                                  : "whole";
    return detail::join(config_.row->name, " (weight gradient",
                        bias_sums_.present() ? " and bias's, " : ", ", parts, ")");
  }
  std::vector<Operand> operands() const override {
    return {input_, grad_output_, partials_, grad_weight_, bias_sums_};
  }
  void run(RunContext const& context, void*) const override {
    check_whole(config_, context);
    auto const address = reinterpret_cast<uintptr_t>(context.at(grad_weight_));
    int const pair = Config::kPair * int(size_of(config_.traits().dtype));
    FUSEDCONV_CHECK(address % pair == 0, config_.row->name, ": grad_weight: got address ", address);
    config_.row->launch({.config = config_,
                         .input = context.at(input_),
                         .grad_output = context.at(grad_output_),
                         .partials = context.at<float>(partials_),
                         .grad_weight = context.at(grad_weight_),
                         .weight = &target_,
                         .bias_sums = context.at<float>(bias_sums_),
                         .bias_channels = bias_channels_},
                        context.stream);
  }

 private:
  Config config_;
  Operand input_, grad_output_, partials_;
  FilterSource target_;
  Operand grad_weight_, bias_sums_;
  int bias_channels_;
};

// target: as add_partials() takes it.
class AddPartials final : public Step {
 public:
  AddPartials(Config const& config, FilterSource const& target, Operand partials,
              Operand grad_weight)
      : config_(served(config)),
        target_(matching(config, target)),
        partials_(partials),
        grad_weight_(grad_weight) {}

  std::string describe() const override { return "add the weight gradient's parts"; }
  std::vector<Operand> operands() const override { return {partials_, grad_weight_}; }
  void run(RunContext const& context, void*) const override {
    check_whole(config_, context);
    add_partials(config_, target_, context.at<float>(partials_), context.at(grad_weight_),
                 context.stream);
  }

 private:
  Config config_;
  FilterSource target_;
  Operand partials_, grad_weight_;
};

}  // namespace fusedconv::conv::sm90::boxes::weight
