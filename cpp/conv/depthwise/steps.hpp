// The step of a whole forward pass.
#pragma once

#include <string>
#include <vector>

#include "conv/depthwise/rows.hpp"
#include "conv/steps.hpp"

namespace fusedconv::conv::depthwise {

// Convolution, bias, activation, normalisation of every channel, activation. norm.batch is the
// run's. bias, norm_weight and norm_bias may be absent.
class Forward final : public Step {
 public:
  struct Operands {
    Operand input, weight, bias, norm_weight, norm_bias, output;
  };

  Forward(Config const& config, GroupNormProblem const& norm, Operands const& operands);

  std::string describe() const override;
  std::vector<Operand> operands() const override;
  void run(RunContext const& context, void*) const override;

 private:
  Config config_;
  GroupNormProblem norm_;
  Operands operands_;
};

}  // namespace fusedconv::conv::depthwise
