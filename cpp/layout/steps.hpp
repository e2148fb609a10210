// Steps that only move data.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "layout/layout.hpp"
#include "layout/pad_lines.hpp"
#include "layout/split_phases.hpp"
#include "program/step.hpp"

namespace fusedconv::layout {

// problem.batch is the run's; name is the step's, for a person.
class ToChannelsLast final : public Step {
 public:
  ToChannelsLast(std::string name, ChannelsLastProblem const& problem, Operand input,
                 Operand output);

  std::string describe() const override;
  std::vector<Operand> operands() const override;
  void run(RunContext const& context, void* workspace) const override;

 private:
  std::string name_;
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

// problem.batch is the run's. output or sums may be absent; sums is for AddSums, problem.sums().
class PadLines final : public Step {
 public:
  PadLines(std::string name, LinesProblem const& problem, Operand input, Operand output,
           Operand sums);

  std::string describe() const override;
  std::vector<Operand> operands() const override;
  void run(RunContext const& context, void* workspace) const override;

 private:
  std::string name_;  // of what is padded, for a person
  LinesProblem problem_;
  Operand input_, output_, sums_;
};

// problem.batch is the run's. sums may be absent; it is for AddSums, problem.sums().
class SplitPhases final : public Step {
 public:
  SplitPhases(std::string name, PhasesProblem const& problem, Operand input, Operand output,
              Operand sums);

  std::string describe() const override;
  std::vector<Operand> operands() const override;
  void run(RunContext const& context, void* workspace) const override;

 private:
  std::string name_;  // of what is split, for a person
  PhasesProblem problem_;
  Operand input_, output_, sums_;
};

// Of the whole batch: `samples`, where they are not problem.batch, as sums are of several.
class AddSums final : public Step {
 public:
  AddSums(std::string name, ChannelSums const& problem, Operand sums, Operand totals,
          std::optional<int64_t> samples);

  std::string describe() const override;
  std::vector<Operand> operands() const override;
  void run(RunContext const& context, void* workspace) const override;

 private:
  std::string name_;  // of the totals, for a person
  ChannelSums problem_;
  Operand sums_, totals_;
  int64_t samples_;
};

}  // namespace fusedconv::layout
