// The family's steps.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "conv/sm80/rows.hpp"
#include "program/step.hpp"

namespace fusedconv::conv::sm80 {

// Convolution, bias, activation. problem.n is the run's.
class Convolve final : public Step {
 public:
  Convolve(Row const& row, ConvProblem const& problem, Activation activation, Operand input,
           Operand filter, Operand bias, Operand output);

  std::string describe() const override;
  std::vector<Operand> operands() const override;
  int64_t workspace_bytes(int64_t samples) const override;
  void run(RunContext const& context, void* workspace) const override;

 private:
  Row row_;
  ConvProblem problem_;
  Activation activation_;
  Operand input_, filter_, bias_, output_;
};

}  // namespace fusedconv::conv::sm80
