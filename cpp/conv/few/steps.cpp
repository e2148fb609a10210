#include "conv/few/steps.hpp"

#include "fusedconv/check.hpp"

namespace fusedconv::conv::few {

Convolve::Convolve(Config const& config, Activation activation, bool rounds,
                   std::optional<GroupNormProblem> norm, Operands const& operands)
    : config_(served(config)),
      activation_(activation),
      rounds_(rounds),
      norm_(norm),
      operands_(operands) {
  bool const takes_moments = operands.partials.present();
  FUSEDCONV_CHECK(operands.output.present() || takes_moments, config.row->name,
                  ": output: got none, expected one where no moments are taken");
  FUSEDCONV_CHECK(norm.has_value() == operands.statistics.present(), config.row->name,
                  ": statistics: got ", operands.statistics.present() ? "some" : "none",
                  ", expected them with a norm alone");
  FUSEDCONV_CHECK(!(takes_moments && norm), config.row->name,
                  ": partials: got some with a norm, which has statistics");
  if (norm) {
    matching(config_, *norm);
    expect(config_, "dtype of the output", std::string(name_of(norm->output_dtype)),
           std::string(name_of(norm->dtype)));
    expect(config_, "activation in front of the norm",
           std::string(name_of(norm->activation_before)),
           std::string(name_of(Activation::kIdentity)));
  }
}

std::string Convolve::describe() const {
  bool const takes_moments = operands_.partials.present();
  return groupnorm::join_parts(" + ", {detail::join(config_.row->name, " (", config_.reads(), ")"),
                                       operands_.bias.present() ? "bias" : "",
                                       takes_moments && operands_.output.present() ? kSavesSum : "",
                                       groupnorm::step_name(activation_),
                                       takes_moments ? "moments" : "", norm_ ? "normalize" : "",
                                       norm_ ? groupnorm::step_name(norm_->activation_after) : ""});
}

std::vector<Operand> Convolve::operands() const {
  Operands const& o = operands_;
  return {o.input,    o.weight,     o.bias,        o.output,
          o.partials, o.statistics, o.norm_weight, o.norm_bias};
}

void Convolve::run(RunContext const& context, void*) const {
  Operands const& o = operands_;
  GroupNormProblem norm;
  if (norm_) norm = with_batch(*norm_, context.samples);
  config_.row->launch({.config = config_,
                       .batch = int(context.samples),
                       .activation = activation_,
                       .rounds = rounds_,
                       .input = context.at(o.input),
                       .weight = context.at(o.weight),
                       .bias = context.at(o.bias),
                       .output = context.at(o.output),
                       .partials = context.at<groupnorm::Partial>(o.partials),
                       .norm = norm_ ? &norm : nullptr,
                       .statistics = context.at<groupnorm::Statistics>(o.statistics),
                       .norm_weight = context.at(o.norm_weight),
                       .norm_bias = context.at(o.norm_bias)},
                      context.stream);
}

}  // namespace fusedconv::conv::few
