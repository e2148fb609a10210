// The step of a whole forward pass.
#pragma once

#include <string>
#include <vector>

#include "conv/sm90/clusters/rows.hpp"
#include "conv/steps.hpp"

namespace fusedconv::conv::sm90::clusters {

// Convolution, bias, activation, GroupNorm or an affine map of channels, activation. norm.batch is
// the run's. All but input, weight and output may be absent.
class Forward final : public Step {
 public:
  Forward(Config const& config, GroupNormProblem const& norm, Operand input, Operand weight,
          Operand bias, Operand norm_weight, Operand norm_bias, Operand output, Operand conv_output,
          Operand mean, Operand rstd)
      : config_(served(config)),
        norm_(matching(config, norm)),
        input_(input),
        weight_(weight),
        bias_(bias),
        norm_weight_(norm_weight),
        norm_bias_(norm_bias),
        output_(output),
        conv_output_(conv_output),
        mean_(mean),
        rstd_(rstd) {
    if (config.norm_groups > 0) {
      expect<Config, int64_t>(config, "groups", norm.groups, config.norm_groups);
    }
    if (norm.output_dtype != DType::kFloat32) {
      expect<Config, std::string>(config, "output dtype", name_of(norm.output_dtype),
                                  name_of(norm.dtype));
    }
    Problem const& p = config.problem;
    int64_t pixels = 1;
    for (AxisProblem const& axis : p.axes) pixels *= axis.output;
    expect<Config, int64_t>(config, "pixels", norm.pixels, pixels);
    expect<Config, std::string>(config, "input layout", name_of(norm.input_layout),
                                name_of(p.layout));
    expect<Config, std::string>(config, "output layout", name_of(norm.output_layout),
                                name_of(p.layout));
  }

  std::string describe() const override {
    Schedule const& s = config_.schedule;
    bool const affine = norm_weight_.present() || norm_bias_.present();
    return groupnorm::join_parts(
        " + ", {detail::join(config_.row->name, " (", name_of(config_.problem.layout),
                             ", clusters of ", s.slabs, "x", s.shares, " blocks)"),
                bias_.present() ? "bias" : "", groupnorm::step_name(norm_.activation_before),
                config_.norm_groups > 0 ? "normalize" : (affine ? "affine" : ""),
                groupnorm::step_name(norm_.activation_after)});
  }
  std::vector<Operand> operands() const override {
    return {input_, weight_, bias_, norm_weight_, norm_bias_, output_, conv_output_, mean_, rstd_};
  }
  void run(RunContext const& context, void*) const override {
    GroupNormProblem const norm = with_batch(norm_, context.samples);
    config_.row->launch({.config = config_,
                         .norm = norm,
                         .input = context.at(input_),
                         .weight = context.at(weight_),
                         .bias = context.at(bias_),
                         .norm_weight = context.at(norm_weight_),
                         .norm_bias = context.at(norm_bias_),
                         .output = context.at(output_),
                         .conv_output = context.at(conv_output_),
                         .mean = context.at<float>(mean_),
                         .rstd = context.at<float>(rstd_)},
                        context.stream);
  }

 private:
  Config config_;
  GroupNormProblem norm_;
  Operand input_, weight_, bias_, norm_weight_, norm_bias_, output_, conv_output_, mean_, rstd_;
};

}  // namespace fusedconv::conv::sm90::clusters
