// The step that only these convolutions have.
#pragma once

#include "conv/sm90/normalizing_convolution.hpp"
#include "conv/sm90/phases/rows.hpp"

namespace fusedconv::conv::sm90::phases {

// Convolution, bias, GroupNorm by statistics, activation. bias, weight and norm_bias may be absent.
class ConvolveNormalizing final : public NormalizingConvolution<Config> {
 public:
  using NormalizingConvolution::NormalizingConvolution;

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
};

}  // namespace fusedconv::conv::sm90::phases
