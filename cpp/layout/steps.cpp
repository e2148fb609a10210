#include "layout/steps.hpp"

#include <utility>

#include "fusedconv/check.hpp"

namespace fusedconv::layout {

ToChannelsLast::ToChannelsLast(std::string name, ChannelsLastProblem const& problem, Operand input,
                               Operand output)
    : name_(std::move(name)), problem_(problem), input_(input), output_(output) {}

std::string ToChannelsLast::describe() const {
  return detail::join(name_, " ", name_of(problem_.source), " -> ", name_of(Layout::kChannelsLast),
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

PadLines::PadLines(std::string name, LinesProblem const& problem, Operand input, Operand output,
                   Operand sums)
    : name_(std::move(name)), problem_(problem), input_(input), output_(output), sums_(sums) {
  FUSEDCONV_CHECK(output.present() || sums.present(), "PadLines: got neither output nor sums");
}

std::string PadLines::describe() const {
  if (!output_.present()) return detail::join("sums of ", name_, " by channel");
  return detail::join("pad ", name_, ", lines of ", problem_.columns, " to ",
                      problem_.line_vectors() * 16 / size_of(problem_.dtype),
                      sums_.present() ? ", + sums by channel" : "");
}

std::vector<Operand> PadLines::operands() const { return {input_, output_, sums_}; }

void PadLines::run(RunContext const& context, void*) const {
  LinesProblem problem = problem_;
  problem.batch = context.samples;
  pad_lines(problem, context.at(input_), context.at(output_), context.at<float>(sums_),
            context.stream);
}

SplitPhases::SplitPhases(std::string name, PhasesProblem const& problem, Operand input,
                         Operand output, Operand sums)
    : name_(std::move(name)), problem_(problem), input_(input), output_(output), sums_(sums) {}

std::string SplitPhases::describe() const {
  int const columns = problem_.positions[2];
  return detail::join(
      "split ", name_, " into ", problem_.phases.count(), " phases, ",
      problem_.flat ? detail::join("planes of ", problem_.plane_lines() * columns)
                    : detail::join("lines of ", columns, " padded to ", problem_.line_elements()),
      sums_.present() ? ", + sums by channel" : "");
}

std::vector<Operand> SplitPhases::operands() const { return {input_, output_, sums_}; }

void SplitPhases::run(RunContext const& context, void*) const {
  PhasesProblem problem = problem_;
  problem.batch = context.samples;
  split_phases(problem, context.at(input_), context.at(output_), context.at<float>(sums_),
               context.stream);
}

AddSums::AddSums(std::string name, ChannelSums const& problem, Operand sums, Operand totals,
                 std::optional<int64_t> samples)
    : name_(std::move(name)),
      problem_(problem),
      sums_(sums),
      totals_(totals),
      samples_(samples.value_or(problem.batch)) {}

std::string AddSums::describe() const { return name_; }

std::vector<Operand> AddSums::operands() const { return {sums_, totals_}; }

void AddSums::run(RunContext const& context, void*) const {
  FUSEDCONV_CHECK(context.samples == samples_, "AddSums: batch: got ", context.samples,
                  ", expected ", samples_);
  add_sums(problem_, context.at<float>(sums_), context.at(totals_), context.stream);
}

}  // namespace fusedconv::layout
