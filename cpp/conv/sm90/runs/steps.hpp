// The convolution as a step.
#pragma once

#include <string>
#include <vector>

#include "conv/sm90/runs/passes.hpp"
#include "conv/sm90/runs/rows.hpp"
#include "conv/sm90/shared_steps.hpp"
#include "fusedconv/activation.hpp"
#include "program/step.hpp"

namespace fusedconv::conv::sm90::runs {

using sm90::MergeMoments;
using sm90::PackFilter;

// Convolution, bias, activation, and by tile and channel the moments of activated values. Without
// activates_output it is stored before the activation. bias and partials may be absent.
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

}  // namespace fusedconv::conv::sm90::runs
