// A BatchNorm of inference as an affine map of channels, for tensors in the memory of the
// processor.
#pragma once

#include <cstdint>

#include "fusedconv/types.hpp"

namespace fusedconv::cpu {

// Tensors [channels]: running statistics of one dtype, weight and bias of another, which may be
// null.
struct BatchNormTensors {
  int64_t channels = 0;
  double eps = 0.0;
  DType statistics_dtype = DType::kFloat32;
  DType affine_dtype = DType::kFloat32;
  void const* mean = nullptr;
  void const* variance = nullptr;
  void const* weight = nullptr;
  void const* bias = nullptr;
};

// scale = weight / sqrt(variance + eps), shift = bias - mean scale. Throws InvalidArgument.
void fold_batch_norm(BatchNormTensors const& tensors, float* scale, float* shift);

// The gradients of weight and bias from those of scale and shift: grad_weight =
// (grad_scale - mean grad_shift) / sqrt(variance + eps), grad_bias = grad_shift. Gradients that are
// given may be null, for zeros, and those asked for, of the affine dtype, are not computed then.
struct FoldGradients {
  float const* scale = nullptr;
  float const* shift = nullptr;
  void* weight = nullptr;
  void* bias = nullptr;
};
void fold_batch_norm_gradients(BatchNormTensors const& tensors, FoldGradients const& gradients);

}  // namespace fusedconv::cpu
