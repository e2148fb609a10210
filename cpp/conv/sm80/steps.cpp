#include "conv/sm80/steps.hpp"

#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm80 {

Convolve::Convolve(Row const& row, ConvProblem const& problem, Activation activation, Operand input,
                   Operand filter, Operand bias, Operand output)
    : row_(row),
      problem_(problem),
      activation_(activation),
      input_(input),
      filter_(filter),
      bias_(bias),
      output_(output) {}

std::string Convolve::describe() const {
  std::string result = row_.name;
  if (bias_.present()) result += " + bias";
  if (activation_ != Activation::kIdentity) result += detail::join(" + ", name_of(activation_));
  return result;
}

std::vector<Operand> Convolve::operands() const { return {input_, filter_, bias_, output_}; }

int64_t Convolve::workspace_bytes(int64_t samples) const {
  ConvProblem problem = problem_;
  problem.n = int(samples);
  return row_.workspace_bytes(problem);
}

void Convolve::run(RunContext const& context, void* workspace) const {
  Arguments arguments{.problem = problem_,
                      .input = context.at(input_),
                      .filter = context.at(filter_),
                      .bias = context.at(bias_),
                      .output = context.at(output_),
                      .activation = activation_,
                      .workspace = workspace};
  arguments.problem.n = int(context.samples);
  row_.launch(arguments, context.stream);
}

}  // namespace fusedconv::conv::sm80
