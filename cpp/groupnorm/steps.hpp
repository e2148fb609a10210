// The room's steps: GroupNorm in two passes or in one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "groupnorm/passes.hpp"
#include "groupnorm/resident.hpp"
#include "groupnorm/streamed.hpp"
#include "program/step.hpp"

namespace fusedconv::groupnorm {

// Of the operand between Moments and Normalize, per sample.
int64_t statistics_bytes(int64_t groups);

// Activation and statistics of each group. Any of statistics, mean and rstd may be absent.
// problem.batch is the run's.
class Moments final : public Step {
 public:
  Moments(GroupNormProblem const& problem, Operand input, Operand statistics, Operand mean,
          Operand rstd);

  std::string describe() const override;
  std::vector<Operand> operands() const override;
  int64_t workspace_bytes(int64_t samples) const override;
  void run(RunContext const& context, void* workspace) const override;

 private:
  GroupNormProblem problem_;
  Operand input_, statistics_, mean_, rstd_;
};

// Activation, normalisation, activation, in the output's layout and dtype; without statistics
// nothing is normalised. problem.batch is the run's. `name`, unless empty, stands for what the step
// computes in its description.
class Normalize final : public Step {
 public:
  Normalize(GroupNormProblem const& problem, Operand input, Operand statistics, Operand weight,
            Operand bias, Operand output, std::string name);

  std::string describe() const override;
  std::vector<Operand> operands() const override;
  void run(RunContext const& context, void* workspace) const override;

 private:
  GroupNormProblem problem_;
  Operand input_, statistics_, weight_, bias_, output_;
  std::string name_;
};

// All of it in one pass over the tensor; weight, bias, mean and rstd may be absent.
class OnePass : public Step {
 public:
  struct Operands {
    Operand input, mean, rstd, weight, bias, output;
  };

  std::vector<Operand> operands() const override;

 protected:
  OnePass(GroupNormProblem const& problem, Operands const& operands);

  // place: where a group stays meanwhile.
  std::string describe_in(std::string const& place) const;
  GroupNormTensors tensors(RunContext const& context) const;

  GroupNormProblem problem_;

 private:
  Operands operands_;
};

// problem.batch is the run's, at most what the config was made for.
class NormalizeResident final : public OnePass {
 public:
  NormalizeResident(ResidentConfig const& config, GroupNormProblem const& problem,
                    Operands const& operands);

  std::string describe() const override;
  void run(RunContext const& context, void* workspace) const override;

 private:
  ResidentConfig config_;
};

// Takes the whole batch that the config was made for.
class NormalizeStreamed final : public OnePass {
 public:
  NormalizeStreamed(StreamedConfig const& config, GroupNormProblem const& problem,
                    Operands const& operands);

  std::string describe() const override;
  int64_t workspace_bytes(int64_t samples) const override;
  void run(RunContext const& context, void* workspace) const override;

 private:
  StreamedConfig config_;
};

}  // namespace fusedconv::groupnorm
