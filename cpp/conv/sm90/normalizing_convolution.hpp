// The step of a convolution whose epilogue normalises: all but its launch.
#pragma once

#include <string>
#include <vector>

#include "conv/steps.hpp"

namespace fusedconv::conv::sm90 {

// Convolution, bias, normalisation, activation: GroupNorm by statistics or, of configs that have
// holds_pixels(), where there are none LayerNorm over the channels of a pixel. bias, weight and
// norm_bias may be absent.
template <class Config>
class NormalizingConvolution : public Step {
 public:
  NormalizingConvolution(Config const& config, GroupNormProblem const& norm, Operand input,
                         FilterOperand const& filter, Operand bias, Operand statistics,
                         Operand weight, Operand norm_bias, Operand output)
      : config_(served(config)),
        norm_(matching(config, norm)),
        input_(input),
        filter_(matching(config, filter)),
        bias_(bias),
        statistics_(statistics),
        weight_(weight),
        norm_bias_(norm_bias),
        output_(output) {
    if constexpr (requires { config.holds_pixels(); }) {
      if (!statistics.present()) {
        expect(config, "whether a block has all channels of a pixel", config.holds_pixels(), true);
      }
    } else {
      expect(config, "statistics", statistics.present(), true);
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

 protected:
  Config config_;
  GroupNormProblem norm_;
  Operand input_;
  FilterOperand filter_;
  Operand bias_, statistics_, weight_, norm_bias_, output_;
};

}  // namespace fusedconv::conv::sm90
