// The family's steps.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "conv/problem.hpp"
#include "conv/sm90/rows.hpp"
#include "conv/sm90/shared_steps.hpp"
#include "fusedconv/activation.hpp"
#include "fusedconv/groupnorm.hpp"
#include "program/step.hpp"

namespace fusedconv::conv::sm90 {

// Convolution, bias, activation, and by tile and channel the moments of activated values. The
// output is in the order of accumulators; without activates_output it is stored before the
// activation. bias and partials may be absent.
class Convolve final : public Step {
 public:
  Convolve(Config const& config, Activation activation, bool activates_output, Operand input,
           Operand filter, Operand bias, Operand output, Operand partials);

  std::string describe() const override;
  std::vector<Operand> operands() const override;
  void run(RunContext const& context, void* workspace) const override;

 private:
  Config config_;
  Activation activation_;
  bool activates_output_;
  Operand input_, filter_, bias_, output_, partials_;
};

// From the order of accumulators to the problem's output layout; normalises where there are
// statistics. conv_output, which may be absent too, takes the values as they came. problem.batch is
// the run's.
class Finalize final : public Step {
 public:
  Finalize(Config const& config, GroupNormProblem const& problem, Operand input, Operand statistics,
           Operand weight, Operand bias, Operand output, Operand conv_output);

  std::string describe() const override;
  std::vector<Operand> operands() const override;
  void run(RunContext const& context, void* workspace) const override;

 private:
  Config config_;
  GroupNormProblem problem_;
  Operand input_, statistics_, weight_, bias_, output_, conv_output_;
};

}  // namespace fusedconv::conv::sm90
