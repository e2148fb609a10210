// The steps of gradients: of depthwise convolutions, and of those of few input channels. They take
// the whole batch, config.batch.
#pragma once

#include <string>
#include <vector>

#include "conv/direct/gradients/few_channels.hpp"
#include "conv/direct/gradients/gradients.hpp"
#include "program/step.hpp"

namespace fusedconv::conv::direct {

// The input's gradient, parts of the weight's, or both; what is not wanted is absent, with what it
// alone is computed from.
struct GradientOperands {
  Operand input, grad_output, weight, grad_input, partials;
};

class Gradients final : public Step {
 public:
  Gradients(GradientConfig const& config, FilterSource const& source,
            GradientOperands const& operands);

  std::string describe() const override;
  std::vector<Operand> operands() const override;
  void run(RunContext const& context, void* workspace) const override;

 private:
  GradientConfig config_;
  FilterSource source_;
  GradientOperands operands_;
};

class AddWeightParts final : public Step {
 public:
  AddWeightParts(GradientConfig const& config, Operand partials, Operand grad_weight);

  std::string describe() const override;
  std::vector<Operand> operands() const override;
  void run(RunContext const& context, void* workspace) const override;

 private:
  GradientConfig config_;
  Operand partials_, grad_weight_;
};

class FewGradients final : public Step {
 public:
  FewGradients(few::Config const& config, FilterSource const& source,
               GradientOperands const& operands);

  std::string describe() const override;
  std::vector<Operand> operands() const override;
  void run(RunContext const& context, void* workspace) const override;

 private:
  few::Config config_;
  FilterSource source_;
  GradientOperands operands_;
};

class AddFewParts final : public Step {
 public:
  AddFewParts(few::Config const& config, FilterSource const& target, Operand partials,
              Operand grad_weight);

  std::string describe() const override;
  std::vector<Operand> operands() const override;
  void run(RunContext const& context, void* workspace) const override;

 private:
  few::Config config_;
  FilterSource target_;
  Operand partials_, grad_weight_;
};

}  // namespace fusedconv::conv::direct
