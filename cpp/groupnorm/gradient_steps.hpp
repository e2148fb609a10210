// The steps of the backward pass. All of them take the whole batch, problem.batch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "groupnorm/gradient.hpp"
#include "groupnorm/streamed_gradients.hpp"
#include "program/step.hpp"

namespace fusedconv::groupnorm {

// What the forward pass got and left, and the gradient of its output. weight and bias may be
// absent.
struct GradientOperands {
  Operand input, grad_output, mean, rstd, weight, bias;
};

// The input's gradient: dense, or in lines of so many columns at a pitch, in elements, and there or
// channels last its sums by channel, which may be absent: see GradientTensors.
struct GradientResult {
  Operand grad_input;
  int columns = 0;
  int pitch = 0;
  Operand sums;
};

// Partial sums for MergeGradientSums.
class GradientSums final : public Step {
 public:
  GradientSums(GradientConfig const& config, GroupNormProblem const& problem,
               GradientOperands const& operands, Operand partials);

  std::string describe() const override;
  std::vector<Operand> operands() const override;
  void run(RunContext const& context, void* workspace) const override;

 private:
  GroupNormProblem problem_;
  GradientOperands operands_;
  Operand partials_;
};

// The input's gradient, and partial sums for MergeGradientSums.
class StreamedGradients final : public Step {
 public:
  StreamedGradients(StreamedGradientConfig const& config, GroupNormProblem const& problem,
                    GradientOperands const& operands, GradientResult const& result,
                    Operand partials);

  std::string describe() const override;
  std::vector<Operand> operands() const override;
  int64_t workspace_bytes(int64_t samples) const override;
  void run(RunContext const& context, void* workspace) const override;

 private:
  StreamedGradientConfig config_;
  GroupNormProblem problem_;
  GradientOperands operands_;
  GradientResult result_;
  Operand partials_;
};

// Sums for AffineGradients and terms for InputGradient, of either config's partial sums.
class MergeGradientSums final : public Step {
 public:
  MergeGradientSums(GradientBuffers const& buffers, GroupNormProblem const& problem, Operand weight,
                    Operand partials, Operand sums, Operand terms);

  std::string describe() const override;
  std::vector<Operand> operands() const override;
  void run(RunContext const& context, void* workspace) const override;

 private:
  GradientBuffers buffers_;
  GroupNormProblem problem_;
  Operand weight_, partials_, sums_, terms_;
};

// The gradient of a convolution's bias, from the sums that another step has left in so many parts;
// all absent where it is not asked for.
struct ConvBias {
  Operand sums;
  int parts = 0;
  Operand grad;
};

// One of grad_weight and grad_bias may be absent.
class AffineGradients final : public Step {
 public:
  AffineGradients(GroupNormProblem const& problem, Operand sums, Operand grad_weight,
                  Operand grad_bias, ConvBias const& conv_bias);

  std::string describe() const override;
  std::vector<Operand> operands() const override;
  void run(RunContext const& context, void* workspace) const override;

 private:
  GroupNormProblem problem_;
  Operand sums_, grad_weight_, grad_bias_;
  ConvBias conv_bias_;
};

class InputGradient final : public Step {
 public:
  InputGradient(GradientConfig const& config, GroupNormProblem const& problem,
                GradientOperands const& operands, Operand terms, GradientResult const& result);

  std::string describe() const override;
  std::vector<Operand> operands() const override;
  void run(RunContext const& context, void* workspace) const override;

 private:
  GroupNormProblem problem_;
  GradientOperands operands_;
  Operand terms_;
  GradientResult result_;
};

}  // namespace fusedconv::groupnorm
