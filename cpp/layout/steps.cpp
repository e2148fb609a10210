#include "layout/steps.hpp"

#include "fusedconv/check.hpp"

namespace fusedconv::layout {

ToChannelsLast::ToChannelsLast(ChannelsLastProblem const& problem, Operand input, Operand output)
    : problem_(problem), input_(input), output_(output) {}

std::string ToChannelsLast::describe() const {
  return detail::join("input ", name_of(problem_.source), " -> ", name_of(Layout::kChannelsLast),
                      ", ", problem_.round_tf32 ? "rounded to TF32" : "copied", ", channels ",
                      problem_.channels, " -> ", problem_.padded_channels);
}

std::vector<Operand> ToChannelsLast::operands() const { return {input_, output_}; }

void ToChannelsLast::run(RunContext const& context, void*) const {
  ChannelsLastProblem problem = problem_;
  problem.batch = context.samples;
  to_channels_last(problem, context.at(input_), context.at(output_), context.stream);
}

PackFilter::PackFilter(PackedFilterProblem const& problem, Operand weight, Operand bias,
                       Operand filter, Operand packed_bias)
    : problem_(problem), weight_(weight), bias_(bias), filter_(filter), packed_bias_(packed_bias) {
  FUSEDCONV_CHECK(bias.present() == packed_bias.present(), "bias: got ",
                  bias.present() ? "one without" : "none with", " a packed_bias");
}

std::string PackFilter::describe() const {
  return problem_.round_tf32 ? "pack filter (rounded to TF32)" : "pack filter";
}

std::vector<Operand> PackFilter::operands() const {
  return {weight_, bias_, filter_, packed_bias_};
}

void PackFilter::run(RunContext const& context, void*) const {
  pack_filter(problem_, context.at(weight_), context.at(bias_), context.at(filter_),
              context.at(packed_bias_), context.stream);
}

}  // namespace fusedconv::layout
