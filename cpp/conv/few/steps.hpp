// The pass of this kind of convolution as a step.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "conv/few/rows.hpp"
#include "conv/steps.hpp"

namespace fusedconv::conv::few {

// Convolution, bias, activation and, with a `norm` of statistics that lie somewhere, normalisation;
// with partials the moments of activated values in its place: what an output then has is before the
// activation. `norm` has the activation behind it, none in front. With `rounds` all of it is of
// sums as they are stored.
class Convolve final : public Step {
 public:
  struct Operands {
    Operand input, weight, bias, output, partials, statistics, norm_weight, norm_bias;
  };

  Convolve(Config const& config, Activation activation, bool rounds,
           std::optional<GroupNormProblem> norm, Operands const& operands);

  std::string describe() const override;
  std::vector<Operand> operands() const override;
  void run(RunContext const& context, void*) const override;

 private:
  Config config_;
  Activation activation_;
  bool rounds_;
  std::optional<GroupNormProblem> norm_;
  Operands operands_;
};

}  // namespace fusedconv::conv::few
