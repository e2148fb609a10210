// The steps that only these convolutions have.
#pragma once

#include "conv/sm90/boxes/passes.hpp"
#include "conv/sm90/boxes/rows.hpp"
#include "conv/sm90/normalizing_convolution.hpp"

namespace fusedconv::conv::sm90::boxes {

// Convolution, bias, normalisation, activation: LayerNorm over the channels of a pixel, or where
// there are statistics, GroupNorm by these. bias, statistics, weight and norm_bias may be absent.
class ConvolveNormalizing final : public NormalizingConvolution<Config> {
 public:
  using NormalizingConvolution::NormalizingConvolution;

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
};

}  // namespace fusedconv::conv::sm90::boxes
