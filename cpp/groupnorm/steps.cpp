#include "groupnorm/steps.hpp"

#include <utility>

#include "fusedconv/check.hpp"
#include "groupnorm/describe.hpp"
#include "groupnorm/support.hpp"

namespace fusedconv::groupnorm {

int64_t statistics_bytes(int64_t groups) { return groups * int64_t(sizeof(Statistics)); }

Moments::Moments(GroupNormProblem const& problem, Operand input, Operand statistics, Operand mean,
                 Operand rstd)
    : problem_(problem), input_(input), statistics_(statistics), mean_(mean), rstd_(rstd) {}

std::string Moments::describe() const {
  return detail::join(join_parts(" + ", {step_name(problem_.activation_before), "moments"}), " (",
                      name_of(problem_.input_layout), ")");
}

std::vector<Operand> Moments::operands() const { return {input_, statistics_, mean_, rstd_}; }

int64_t Moments::workspace_bytes(int64_t samples) const {
  return moments_workspace_bytes(problem_, samples);
}

void Moments::run(RunContext const& context, void* workspace) const {
  GroupNormProblem problem = problem_;
  problem.batch = context.samples;
  moments(problem, context.at(input_),
          {.statistics = context.at<Statistics>(statistics_),
           .mean = context.at<float>(mean_),
           .rstd = context.at<float>(rstd_)},
          workspace, context.stream);
}

Normalize::Normalize(GroupNormProblem const& problem, Operand input, Operand statistics,
                     Operand weight, Operand bias, Operand output, std::string name)
    : problem_(problem),
      input_(input),
      statistics_(statistics),
      weight_(weight),
      bias_(bias),
      output_(output),
      name_(std::move(name)) {}

std::string Normalize::describe() const {
  std::string what = name_;
  if (what.empty()) {
    what = join_parts(
        " + ", {step_name(problem_.activation_before), statistics_.present() ? "normalize" : "",
                step_name(problem_.activation_after)});
  }
  if (what.empty()) what = "copy";
  return detail::join(what, " (", name_of(problem_.input_layout), " -> ",
                      name_of(problem_.output_layout), ")");
}

std::vector<Operand> Normalize::operands() const {
  return {input_, statistics_, weight_, bias_, output_};
}

void Normalize::run(RunContext const& context, void*) const {
  GroupNormProblem problem = problem_;
  problem.batch = context.samples;
  normalize(problem,
            {.input = context.at(input_),
             .output = context.at(output_),
             .weight = context.at(weight_),
             .bias = context.at(bias_)},
            context.at<Statistics>(statistics_), context.stream);
}

OnePass::OnePass(GroupNormProblem const& problem, Operands const& operands)
    : problem_(problem), operands_(operands) {}

std::vector<Operand> OnePass::operands() const {
  return {operands_.input,  operands_.mean, operands_.rstd,
          operands_.weight, operands_.bias, operands_.output};
}

std::string OnePass::describe_in(std::string const& place) const {
  return detail::join(
      join_parts(" + ", {step_name(problem_.activation_before), "moments + normalize",
                         step_name(problem_.activation_after)}),
      " in one pass (", place, ")");
}

GroupNormTensors OnePass::tensors(RunContext const& context) const {
  return {.input = context.at(operands_.input),
          .output = context.at(operands_.output),
          .weight = context.at(operands_.weight),
          .bias = context.at(operands_.bias),
          .mean = context.at<float>(operands_.mean),
          .rstd = context.at<float>(operands_.rstd)};
}

NormalizeResident::NormalizeResident(ResidentConfig const& config, GroupNormProblem const& problem,
                                     Operands const& operands)
    : OnePass(problem, operands), config_(config) {
  check_supported("NormalizeResident", config.support);
}

std::string NormalizeResident::describe() const {
  return describe_in(detail::join(config_.threads, " threads a group"));
}

void NormalizeResident::run(RunContext const& context, void*) const {
  GroupNormProblem problem = problem_;
  problem.batch = context.samples;
  normalize_resident(config_, problem, tensors(context), context.stream);
}

NormalizeStreamed::NormalizeStreamed(StreamedConfig const& config, GroupNormProblem const& problem,
                                     Operands const& operands)
    : OnePass(problem, operands), config_(config) {
  check_supported("NormalizeStreamed", config.support);
}

std::string NormalizeStreamed::describe() const { return describe_in(place_of(config_)); }

int64_t NormalizeStreamed::workspace_bytes(int64_t) const { return config_.words_bytes(); }

void NormalizeStreamed::run(RunContext const& context, void* workspace) const {
  FUSEDCONV_CHECK(context.samples == problem_.batch, "NormalizeStreamed: got a batch chunk of ",
                  context.samples, " samples of ", problem_.batch);
  normalize_streamed(config_, problem_, tensors(context), workspace, context.stream);
}

}  // namespace fusedconv::groupnorm
