#include "conv/depthwise/steps.hpp"

#include "fusedconv/check.hpp"

namespace fusedconv::conv::depthwise {

Forward::Forward(Config const& config, GroupNormProblem const& norm, Operands const& operands)
    : config_(served(config)), norm_(matching(config, norm)), operands_(operands) {
  Problem const& p = config.problem;
  int64_t pixels = 1;
  for (AxisProblem const& axis : p.axes) pixels *= axis.output;
  expect<Config, int64_t>(config, "pixels", norm.pixels, pixels);
  expect<Config, int64_t>(config, "groups", norm.groups, norm.channels);
  expect<Config, std::string>(config, "dtype of the output", name_of(norm.output_dtype),
                              name_of(norm.dtype));
  expect<Config, std::string>(config, "input layout", name_of(norm.input_layout),
                              name_of(p.layout));
  expect<Config, std::string>(config, "output layout", name_of(norm.output_layout),
                              name_of(p.layout));
  FUSEDCONV_CHECK(
      operands.input.present() && operands.weight.present() && operands.output.present(),
      config.row->name, ": input, weight or output: got none");
}

std::string Forward::describe() const {
  return groupnorm::join_parts(
      " + ", {detail::join(config_.row->name, " (", name_of(config_.problem.layout), ")"),
              operands_.bias.present() ? "bias" : "", groupnorm::step_name(norm_.activation_before),
              "normalize", groupnorm::step_name(norm_.activation_after)});
}

std::vector<Operand> Forward::operands() const {
  Operands const& o = operands_;
  return {o.input, o.weight, o.bias, o.norm_weight, o.norm_bias, o.output};
}

void Forward::run(RunContext const& context, void*) const {
  Operands const& o = operands_;
  GroupNormProblem const norm = with_batch(norm_, context.samples);
  config_.row->launch({.config = config_,
                       .norm = norm,
                       .input = context.at(o.input),
                       .weight = context.at(o.weight),
                       .bias = context.at(o.bias),
                       .norm_weight = context.at(o.norm_weight),
                       .norm_bias = context.at(o.norm_bias),
                       .output = context.at(o.output)},
                      context.stream);
}

}  // namespace fusedconv::conv::depthwise
