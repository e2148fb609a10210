// The family's steps.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "conv/problem.hpp"
#include "conv/sm90/passes.hpp"
#include "conv/sm90/rows.hpp"
#include "conv/steps.hpp"
#include "fusedconv/groupnorm.hpp"
#include "program/step.hpp"

namespace fusedconv::conv::sm90 {

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
