#include "groupnorm/gradient_steps.hpp"

#include "fusedconv/check.hpp"
#include "groupnorm/describe.hpp"
#include "groupnorm/support.hpp"

namespace fusedconv::groupnorm {
namespace {

std::vector<Operand> all_of(GradientOperands const& o, std::initializer_list<Operand> others) {
  std::vector<Operand> result{o.input, o.grad_output, o.mean, o.rstd, o.weight, o.bias};
  result.insert(result.end(), others);
  return result;
}

GradientTensors tensors_of(RunContext const& context, GradientOperands const& o,
                           GradientResult const& result = {}) {
  return {.input = context.at(o.input),
          .grad_output = context.at(o.grad_output),
          .mean = context.at<float>(o.mean),
          .rstd = context.at<float>(o.rstd),
          .weight = context.at(o.weight),
          .bias = context.at(o.bias),
          .grad_input = context.at(result.grad_input),
          .columns = result.columns,
          .pitch = result.pitch,
          .sums = context.at<float>(result.sums)};
}

// In the order in which the gradient passes through them.
std::string passed_through(GroupNormProblem const& p) {
  return join_parts(" + ", {step_name(p.activation_after), "norm", step_name(p.activation_before)});
}

// How the output's gradient differs from the input, if it does.
std::string described_gradient(GroupNormProblem const& p) {
  return has_wide_gradient(p) ? detail::join(", of ", name_of(p.output_dtype)) : "";
}

GradientResult const& checked(char const* step, GradientResult const& result,
                              GroupNormProblem const& p) {
  if (result.columns != 0) {
    FUSEDCONV_CHECK(result.columns > 0 && p.pixels % result.columns == 0, step, ": columns: got ",
                    result.columns, " for planes of ", p.pixels);
    FUSEDCONV_CHECK(result.pitch >= result.columns, step, ": pitch: got ", result.pitch, " for ",
                    result.columns, " columns");
    FUSEDCONV_CHECK(result.pitch == result.columns || result.pitch * size_of(p.dtype) % 16 == 0,
                    step, ": pitch: got ", result.pitch, " elements of ", size_of(p.dtype),
                    " bytes, expected whole 16 bytes");
    FUSEDCONV_CHECK(p.pixels / result.columns * result.pitch < int64_t(1) << 31, step,
                    ": pitch: got ", result.pitch, " for planes of ", p.pixels);
  }
  FUSEDCONV_CHECK(
      result.columns != 0 || !result.sums.present() || p.input_layout == Layout::kChannelsLast,
      step, ": sums: got some of planes without columns");
  return result;
}

std::string described(GradientResult const& result) {
  return detail::join(result.columns != result.pitch
                          ? detail::join(", lines of ", result.columns, " padded to ", result.pitch)
                          : "",
                      result.sums.present() ? ", + sums by channel" : "");
}

void check_whole(char const* step, GroupNormProblem const& p, RunContext const& context) {
  FUSEDCONV_CHECK(context.samples == p.batch, step, ": got a batch chunk of ", context.samples,
                  " samples of ", p.batch);
}

}  // namespace

GradientSums::GradientSums(GradientConfig const& config, GroupNormProblem const& problem,
                           GradientOperands const& operands, Operand partials)
    : problem_(problem), operands_(operands), partials_(partials) {
  check_supported("GradientSums", config.support);
}

std::string GradientSums::describe() const {
  return detail::join("sums of gradients (", name_of(problem_.input_layout), ")",
                      described_gradient(problem_));
}

std::vector<Operand> GradientSums::operands() const { return all_of(operands_, {partials_}); }

void GradientSums::run(RunContext const& context, void*) const {
  check_whole("GradientSums", problem_, context);
  gradient_sums(problem_, tensors_of(context, operands_), context.at<GradientSum>(partials_),
                context.stream);
}

StreamedGradients::StreamedGradients(StreamedGradientConfig const& config,
                                     GroupNormProblem const& problem,
                                     GradientOperands const& operands, GradientResult const& result,
                                     Operand partials)
    : config_(config),
      problem_(problem),
      operands_(operands),
      result_(checked("StreamedGradients", result, problem)),
      partials_(partials) {
  check_supported("StreamedGradients", config.support);
  FUSEDCONV_CHECK(!result.sums.present() || problem.input_layout == Layout::kChannelsFirst,
                  "sums: got some of a tensor that is channels last");
}

std::string StreamedGradients::describe() const {
  return detail::join("gradient through ", passed_through(problem_), " in one pass (",
                      place_of(config_.streamed), ")", described_gradient(problem_),
                      described(result_));
}

std::vector<Operand> StreamedGradients::operands() const {
  return all_of(operands_, {result_.grad_input, result_.sums, partials_});
}

int64_t StreamedGradients::workspace_bytes(int64_t) const { return config_.streamed.words_bytes(); }

void StreamedGradients::run(RunContext const& context, void* workspace) const {
  check_whole("StreamedGradients", problem_, context);
  streamed_gradients(config_, problem_, tensors_of(context, operands_, result_),
                     context.at<GradientSum>(partials_), workspace, context.stream);
}

MergeGradientSums::MergeGradientSums(GradientBuffers const& buffers,
                                     GroupNormProblem const& problem, Operand weight,
                                     Operand partials, Operand sums, Operand terms)
    : buffers_(buffers),
      problem_(problem),
      weight_(weight),
      partials_(partials),
      sums_(sums),
      terms_(terms) {
  check_supported("MergeGradientSums", buffers.support);
}

std::string MergeGradientSums::describe() const { return "merge sums of gradients"; }

std::vector<Operand> MergeGradientSums::operands() const {
  return {weight_, partials_, sums_, terms_};
}

void MergeGradientSums::run(RunContext const& context, void*) const {
  check_whole("MergeGradientSums", problem_, context);
  merge_gradient_sums(buffers_, problem_, context.at(weight_), context.at<GradientSum>(partials_),
                      context.at<GradientSum>(sums_), context.at<GroupTerms>(terms_),
                      context.stream);
}

AffineGradients::AffineGradients(GroupNormProblem const& problem, Operand sums, Operand grad_weight,
                                 Operand grad_bias, ConvBias const& conv_bias)
    : problem_(problem),
      sums_(sums),
      grad_weight_(grad_weight),
      grad_bias_(grad_bias),
      conv_bias_(conv_bias) {
  FUSEDCONV_CHECK(grad_weight.present() || grad_bias.present(),
                  "AffineGradients: got neither grad_weight nor grad_bias");
  FUSEDCONV_CHECK(conv_bias.grad.present() == conv_bias.sums.present() &&
                      conv_bias.grad.present() == (conv_bias.parts > 0),
                  "AffineGradients: sums: got ", conv_bias.parts, " parts");
}

std::string AffineGradients::describe() const {
  std::string const more = conv_bias_.grad.present() ? ", bias" : "";
  if (!grad_bias_.present()) return "gradient of norm weight" + more;
  if (!grad_weight_.present()) return "gradient of norm bias" + more;
  return (more.empty() ? "gradients of norm weight and bias"
                       : "gradients of norm weight, norm bias") +
         more;
}

std::vector<Operand> AffineGradients::operands() const {
  return {sums_, grad_weight_, grad_bias_, conv_bias_.sums, conv_bias_.grad};
}

void AffineGradients::run(RunContext const& context, void*) const {
  check_whole("AffineGradients", problem_, context);
  affine_gradients(problem_, context.at<GradientSum>(sums_),
                   {.weight = context.at(grad_weight_),
                    .bias = context.at(grad_bias_),
                    .dtype = problem_.affine_dtype,
                    .sums = context.at<float>(conv_bias_.sums),
                    .parts = conv_bias_.parts,
                    .conv_bias = context.at(conv_bias_.grad),
                    .conv_dtype = problem_.dtype},
                   context.stream);
}

InputGradient::InputGradient(GradientConfig const& config, GroupNormProblem const& problem,
                             GradientOperands const& operands, Operand terms,
                             GradientResult const& result)
    : problem_(problem),
      operands_(operands),
      terms_(terms),
      result_(checked("InputGradient", result, problem)) {
  check_supported("InputGradient", config.support);
}

std::string InputGradient::describe() const {
  bool const transposes = problem_.input_layout == Layout::kChannelsLast && result_.columns != 0;
  return detail::join("gradient through ", passed_through(problem_), " (",
                      name_of(problem_.input_layout),
                      transposes ? detail::join(" -> ", name_of(Layout::kChannelsFirst)) : "", ")",
                      described_gradient(problem_), described(result_));
}

std::vector<Operand> InputGradient::operands() const {
  return all_of(operands_, {terms_, result_.grad_input, result_.sums});
}

void InputGradient::run(RunContext const& context, void*) const {
  check_whole("InputGradient", problem_, context);
  input_gradient(problem_, tensors_of(context, operands_, result_), context.at<GroupTerms>(terms_),
                 context.stream);
}

}  // namespace fusedconv::groupnorm
