// The step that only these convolutions have.
#pragma once

#include <string>
#include <vector>

#include "conv/sm90/phases/rows.hpp"
#include "conv/steps.hpp"

namespace fusedconv::conv::sm90::phases {

// Convolution, bias, GroupNorm by statistics, activation. bias, weight and norm_bias may be absent.
class ConvolveNormalizing final : public Step {
 public:
  ConvolveNormalizing(Config const& config, GroupNormProblem const& norm, Operand input,
                      FilterOperand const& filter, Operand bias, Operand statistics, Operand weight,
                      Operand norm_bias, Operand output)
      : config_(served(config)),
        norm_(matching(config, norm)),
        input_(input),
        filter_(matching(config, filter)),
        bias_(bias),
        statistics_(statistics),
        weight_(weight),
        norm_bias_(norm_bias),
        output_(output) {
    expect(config, "statistics", statistics.present(), true);
    expect<Config, std::string>(config, "activation in front", name_of(norm.activation_before),
                                name_of(Activation::kIdentity));
    expect<Config, std::string>(config, "output dtype", name_of(norm.output_dtype),
                                name_of(norm.dtype));
  }

  std::string describe() const override {
    return groupnorm::join_parts(
        " + ",
        {detail::join(config_.row->name, " (", config_.reads(), ")"), bias_.present() ? "bias" : "",
         "normalize", groupnorm::step_name(norm_.activation_after)});
  }
  std::vector<Operand> operands() const override {
    return {input_, filter_.packed(), bias_, statistics_, weight_, norm_bias_, output_};
  }
  void run(RunContext const& context, void*) const override {
    GroupNormProblem const norm = with_batch(norm_, context.samples);
    config_.row->launch({.config = config_,
                         .batch = int(context.samples),
                         .activation = norm.activation_after,
                         .input = context.at(input_),
                         .filter = context.at(filter_.packed()),
                         .bias = context.at(bias_),
                         .output = context.at(output_),
                         .norm = &norm,
                         .statistics = context.at<groupnorm::Statistics>(statistics_),
                         .norm_weight = context.at(weight_),
                         .norm_bias = context.at(norm_bias_)},
                        context.stream);
  }

 private:
  Config config_;
  GroupNormProblem norm_;
  Operand input_;
  FilterOperand filter_;
  Operand bias_, statistics_, weight_, norm_bias_, output_;
};

}  // namespace fusedconv::conv::sm90::phases
