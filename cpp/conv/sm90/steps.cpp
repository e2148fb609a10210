#include "conv/sm90/steps.hpp"

#include "conv/sm90/passes.hpp"
#include "fusedconv/check.hpp"
#include "groupnorm/describe.hpp"

namespace fusedconv::conv::sm90 {
namespace {

// Returns the config for a constructor's list of members.
Config const& served(Config const& config) {
  if (Support const& support = config.schedule.support; !support) {
    throw InvalidArgument(detail::join(config.row->name, ": ", support.reason));
  }
  FUSEDCONV_CHECK(config.multiprocessors > 0, config.row->name, ": multiprocessors is ",
                  config.multiprocessors);
  return config;
}

template <class T>
void expect(Config const& config, char const* what, T const& got, T const& expected) {
  if (got == expected) return;
  throw InvalidArgument(
      detail::join(config.row->name, ": ", what, ": got ", got, ", expected ", expected));
}

FilterSource const& matching(Config const& config, FilterSource const& source) {
  ConvProblem const& c = config.problem;
  expect<int64_t>(config, "input channels of the weight", source.c, c.c);
  expect<int64_t>(config, "output channels of the weight", source.k, c.k);
  expect<int64_t>(config, "taps along depth", source.t, c.t);
  expect<int64_t>(config, "taps along height", source.r, c.r);
  expect<int64_t>(config, "taps along width", source.s, c.s);
  return source;
}

GroupNormProblem const& matching(Config const& config, GroupNormProblem const& problem) {
  expect<int64_t>(config, "channels", problem.channels, config.problem.k);
  expect<std::string>(config, "dtype", name_of(problem.dtype),
                      name_of(config.tile().traits().dtype));
  return problem;
}

GroupNormProblem with_batch(GroupNormProblem problem, int64_t batch) {
  problem.batch = batch;
  return problem;
}

}  // namespace

PackFilter::PackFilter(Config const& config, FilterSource const& source, Operand weight,
                       Operand filter)
    : config_(served(config)),
      source_(matching(config, source)),
      weight_(weight),
      filter_(filter) {}

std::string PackFilter::describe() const {
  MathTraits const& math = config_.tile().traits();
  if (math.dtype != DType::kFloat32) return "pack filter";
  return math.parts == 2 ? "pack filter (split in two TF32 parts)"
                         : "pack filter (rounded to TF32)";
}

std::vector<Operand> PackFilter::operands() const { return {weight_, filter_}; }

void PackFilter::run(RunContext const& context, void*) const {
  pack_filter(config_, source_, context.at(weight_), context.at(filter_), context.stream);
}

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
  Schedule const& s = config_.schedule;
  std::string result = detail::join(config_.row->name, " (", name_of(config_.layout), ", ",
                                    s.tma ? "TMA" : "loads by element");
  if (s.strips > 1) result += detail::join(", ", s.strips, " strips");
  return groupnorm::join_parts(
      " + ", {result + ")", bias_.present() ? "bias" : "", groupnorm::step_name(activation_),
              partials_.present() ? "moments" : ""});
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

MergeMoments::MergeMoments(Config const& config, GroupNormProblem const& problem, Operand partials,
                           Operand statistics, Operand mean, Operand rstd)
    : config_(served(config)),
      problem_(matching(config, problem)),
      partials_(partials),
      statistics_(statistics),
      mean_(mean),
      rstd_(rstd) {}

std::string MergeMoments::describe() const { return "merge moments"; }

std::vector<Operand> MergeMoments::operands() const {
  return {partials_, statistics_, mean_, rstd_};
}

void MergeMoments::run(RunContext const& context, void*) const {
  merge_moments(config_, with_batch(problem_, context.samples),
                context.at<groupnorm::Partial>(partials_),
                {.statistics = context.at<groupnorm::Statistics>(statistics_),
                 .mean = context.at<float>(mean_),
                 .rstd = context.at<float>(rstd_)},
                context.stream);
}

Finalize::Finalize(Config const& config, GroupNormProblem const& problem, Operand input,
                   Operand statistics, Operand weight, Operand bias, Operand output,
                   Operand conv_output)
    : config_(served(config)),
      problem_(matching(config, problem)),
      input_(input),
      statistics_(statistics),
      weight_(weight),
      bias_(bias),
      output_(output),
      conv_output_(conv_output) {}

std::string Finalize::describe() const {
  std::string const passes =
      groupnorm::join_parts(" + ", {groupnorm::step_name(problem_.activation_before),
                                    statistics_.present() ? "normalize" : "",
                                    groupnorm::step_name(problem_.activation_after)});
  return detail::join(passes.empty() ? "copy" : passes, " (accumulator order -> ",
                      name_of(problem_.output_layout), ")",
                      conv_output_.present() ? ", and the convolution's output" : "");
}

std::vector<Operand> Finalize::operands() const {
  return {input_, statistics_, weight_, bias_, output_, conv_output_};
}

void Finalize::run(RunContext const& context, void*) const {
  finalize(config_, with_batch(problem_, context.samples),
           {.input = context.at(input_),
            .output = context.at(output_),
            .conv_output = context.at(conv_output_),
            .weight = context.at(weight_),
            .bias = context.at(bias_),
            .statistics = context.at<groupnorm::Statistics>(statistics_)},
           context.stream);
}

}  // namespace fusedconv::conv::sm90
