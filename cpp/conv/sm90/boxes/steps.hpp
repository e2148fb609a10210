// The steps that only these convolutions have.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "conv/sm90/boxes/passes.hpp"
#include "conv/sm90/boxes/rows.hpp"
#include "conv/steps.hpp"

namespace fusedconv::conv::sm90::boxes {

// Convolution, bias, normalisation, activation: LayerNorm over the channels of a pixel, or where
// there are statistics, GroupNorm by these. bias, statistics, weight and norm_bias may be absent.
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
    if (!statistics.present()) {
      expect(config, "whether a block has all channels of a pixel", config.holds_pixels(), true);
    }
    expect<Config, std::string>(config, "activation in front", name_of(norm.activation_before),
                                name_of(Activation::kIdentity));
    expect<Config, std::string>(config, "output dtype", name_of(norm.output_dtype),
                                name_of(norm.dtype));
  }

  std::string describe() const override {
    return groupnorm::join_parts(
        " + ",
        {detail::join(config_.row->name, " (", config_.reads(), ")"), bias_.present() ? "bias" : "",
         statistics_.present() ? "normalize" : "normalize over channels",
         groupnorm::step_name(norm_.activation_after)});
  }
  std::vector<Operand> operands() const override {
    return {input_,      filter_.packed(), filter_.weight(), bias_,
            statistics_, weight_,          norm_bias_,       output_};
  }
  void run(RunContext const& context, void*) const override {
    PixelNorm const pixel{.weight = context.at(weight_),
                          .bias = context.at(norm_bias_),
                          .dtype = norm_.affine_dtype,
                          .eps = float(norm_.eps)};
    GroupStatistics const group{.statistics = context.at<groupnorm::Statistics>(statistics_),
                                .weight = pixel.weight,
                                .bias = pixel.bias,
                                .dtype = pixel.dtype,
                                .groups = int(norm_.groups),
                                .channels = int(norm_.channels_per_group())};
    bool const by_group = statistics_.present();
    Arguments arguments{.config = config_,
                        .batch = int(context.samples),
                        .activation = norm_.activation_after,
                        .input = context.at(input_),
                        .bias = context.at(bias_),
                        .output = context.at(output_),
                        .norm = by_group ? nullptr : &pixel,
                        .group = by_group ? &group : nullptr};
    filter_.fill(config_, context, arguments);
    config_.row->launch(arguments, context.stream);
  }

 private:
  Config config_;
  GroupNormProblem norm_;
  Operand input_;
  FilterOperand filter_;
  Operand bias_, statistics_, weight_, norm_bias_, output_;
};

}  // namespace fusedconv::conv::sm90::boxes
