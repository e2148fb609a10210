// Steps that only move data.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "layout/layout.hpp"
#include "program/step.hpp"

namespace fusedconv::layout {

// problem.batch is the run's.
class ToChannelsLast final : public Step {
 public:
  ToChannelsLast(ChannelsLastProblem const& problem, Operand input, Operand output);

  std::string describe() const override;
  std::vector<Operand> operands() const override;
  void run(RunContext const& context, void* workspace) const override;

 private:
  ChannelsLastProblem problem_;
  Operand input_, output_;
};

// bias and packed_bias may be absent, together.
class PackFilter final : public Step {
 public:
  PackFilter(PackedFilterProblem const& problem, Operand weight, Operand bias, Operand filter,
             Operand packed_bias);

  std::string describe() const override;
  std::vector<Operand> operands() const override;
  void run(RunContext const& context, void* workspace) const override;

 private:
  PackedFilterProblem problem_;
  Operand weight_, bias_, filter_, packed_bias_;
};

}  // namespace fusedconv::layout
