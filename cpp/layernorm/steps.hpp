// The room's step.
#pragma once

#include <string>
#include <vector>

#include "fusedconv/groupnorm.hpp"
#include "program/step.hpp"

namespace fusedconv::layernorm {

// Activation, LayerNorm over the channels of each pixel, activation. weight and bias may be absent;
// output may be the input where the dtypes are equal. problem.batch is the run's.
class Normalize final : public Step {
 public:
  Normalize(GroupNormProblem const& problem, Operand input, Operand weight, Operand bias,
            Operand output);

  std::string describe() const override;
  std::vector<Operand> operands() const override;
  void run(RunContext const& context, void* workspace) const override;

 private:
  GroupNormProblem problem_;
  Operand input_, weight_, bias_, output_;
};

}  // namespace fusedconv::layernorm
