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

 private:
  FoldProblem problem_;
  Operand mean_, variance_, weight_, bias_, scale_, shift_;
};

}  // namespace fusedconv::batchnorm
