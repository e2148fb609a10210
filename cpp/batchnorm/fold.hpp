// A BatchNorm of inference as an affine map of channels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "fusedconv/types.hpp"
#include "program/step.hpp"

namespace fusedconv::batchnorm {

// Tensors [channels]: running statistics of one type, weight and bias of another.
struct FoldProblem {
  int64_t channels = 0;
  double eps = 0.0;
  DType statistics_dtype = DType::kFloat32;
  DType affine_dtype = DType::kFloat32;
};

// scale = weight / sqrt(variance + eps), shift = bias - mean scale, in float32. weight and bias may
// be null.
void fold(FoldProblem const& problem, void const* mean, void const* variance, void const* weight,
          void const* bias, float* scale, float* shift, cudaStream_t stream);

// The gradients of weight and bias from those of scale and shift, all [channels], the latter two in
// float32: grad_weight = (grad_scale - mean grad_shift) / sqrt(variance + eps), grad_bias =
// grad_shift. Any of the four may be null: one that is given is zero then, one that is asked for
// not computed.
struct FoldGradients {
  float const* scale = nullptr;
  float const* shift = nullptr;
  void* weight = nullptr;  // of affine_dtype
  void* bias = nullptr;
};
void fold_gradients(FoldProblem const& problem, void const* mean, void const* variance,
                    FoldGradients const& gradients, cudaStream_t stream);

class Fold final : public Step {
 public:
  // weight and bias may be absent.
  Fold(FoldProblem const& problem, Operand mean, Operand variance, Operand weight, Operand bias,
       Operand scale, Operand shift)
      : problem_(problem),
        mean_(mean),
        variance_(variance),
        weight_(weight),
        bias_(bias),
        scale_(scale),
        shift_(shift) {}

  std::string describe() const override { return "fold running statistics"; }
  std::vector<Operand> operands() const override {
    return {mean_, variance_, weight_, bias_, scale_, shift_};
  }
  void run(RunContext const& context, void*) const override {
    fold(problem_, context.at(mean_), context.at(variance_), context.at(weight_), context.at(bias_),
         static_cast<float*>(context.at(scale_)), static_cast<float*>(context.at(shift_)),
         context.stream);
  }
  Leaves leaves(RunContext const&) const override {
    return problem_.channels > 0 ? Leaves::kReleases : Leaves::kNothing;
  }

 private:
  FoldProblem problem_;
  Operand mean_, variance_, weight_, bias_, scale_, shift_;
};

class GradientsOfFold final : public Step {
 public:
  // Gradients may be absent, those of scale and shift or of weight and bias.
  GradientsOfFold(FoldProblem const& problem, Operand mean, Operand variance, Operand grad_scale,
                  Operand grad_shift, Operand grad_weight, Operand grad_bias)
      : problem_(problem),
        mean_(mean),
        variance_(variance),
        grad_scale_(grad_scale),
        grad_shift_(grad_shift),
        grad_weight_(grad_weight),
        grad_bias_(grad_bias) {}

  std::string describe() const override { return "gradients through folded statistics"; }
  std::vector<Operand> operands() const override {
    return {mean_, variance_, grad_scale_, grad_shift_, grad_weight_, grad_bias_};
  }
  void run(RunContext const& context, void*) const override {
    fold_gradients(problem_, context.at(mean_), context.at(variance_),
                   {.scale = context.at<float>(grad_scale_),
                    .shift = context.at<float>(grad_shift_),
                    .weight = context.at(grad_weight_),
                    .bias = context.at(grad_bias_)},
                   context.stream);
  }

 private:
  FoldProblem problem_;
  Operand mean_, variance_, grad_scale_, grad_shift_, grad_weight_, grad_bias_;
};

}  // namespace fusedconv::batchnorm
