// The room's steps. Both take the whole batch, problem.batch.
#pragma once

#include <string>
#include <vector>

#include "program/step.hpp"
#include "ungrouped/gradient.hpp"

namespace fusedconv::ungrouped {

// The input's gradient, which may be absent, and sums of each channel in parts. weight and bias may
// be absent; the input is where the config reads none.
struct GradientOperands {
  Operand input, grad_output, weight, bias, grad_input, partials;
};

class Gradient final : public Step {
 public:
  Gradient(GradientConfig const& config, GradientOperands const& operands);

  std::string describe() const override;
  std::vector<Operand> operands() const override;
  void run(RunContext const& context, void* workspace) const override;

 private:
  GradientConfig config_;
  GradientOperands operands_;
};

// Gradients by channel, of the parts: any may be absent, but not all.
class AddParts final : public Step {
 public:
  AddParts(GradientConfig const& config, Operand partials, Operand grad_weight, Operand grad_bias,
           Operand grad_conv_bias);

  std::string describe() const override;
  std::vector<Operand> operands() const override;
  void run(RunContext const& context, void* workspace) const override;

 private:
  GradientConfig config_;
  Operand partials_, grad_weight_, grad_bias_, grad_conv_bias_;
};

}  // namespace fusedconv::ungrouped
