#include "conv/sm90/runs/steps.hpp"

#include "fusedconv/check.hpp"
#include "groupnorm/describe.hpp"

namespace fusedconv::conv::sm90::runs {

Convolve::Convolve(Config const& config, Activation activation, bool activates_output,
                   Operand input, Operand filter, Operand bias, Operand output, Operand partials)
    : config_(served(config)),
      activation_(activation),
      activates_output_(activates_output),
      input_(input),
      filter_(filter),
      bias_(bias),
      output_(output),
      partials_(partials) {}

std::string Convolve::describe() const {
  return groupnorm::join_parts(
      " + ", {detail::join(config_.row->name, " (nchw, TMA)"), bias_.present() ? "bias" : "",
              groupnorm::step_name(activation_), partials_.present() ? "moments" : ""});
}

std::vector<Operand> Convolve::operands() const {
  return {input_, filter_, bias_, output_, partials_};
}

void Convolve::run(RunContext const& context, void*) const {
  config_.row->launch({.config = config_,
                       .batch = int(context.samples),
                       .activation = activation_,
                       .activates_output = activates_output_,
                       .input = context.at(input_),
                       .filter = context.at(filter_),
                       .bias = context.at(bias_),
                       .output = context.at(output_),
                       .partials = context.at<groupnorm::Partial>(partials_)},
                      context.stream);
}

}  // namespace fusedconv::conv::sm90::runs
