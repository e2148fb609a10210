// Activation, GroupNorm and activation in one call, and its gradients, for tensors in the memory of
// the processor.
#pragma once

#include "fusedconv/groupnorm.hpp"

namespace fusedconv::cpu {

// Computes in float32 whatever the dtypes, of which one may be float32 where they differ. The bits
// do not depend on `threads`, which only bounds how many OpenMP threads are used. The output may be
// the input, where dtype and layout are the same, and must not overlap it else. A problem without
// elements writes no output, and gives each group that it still has mean 0 and rstd NaN, as PyTorch
// does. Throws InvalidArgument.
void group_norm(GroupNormProblem const& problem, GroupNormTensors const& tensors, int threads);

// The same without statistics: activations, between them weight and bias of each channel, layout
// and dtype.
void activate(GroupNormProblem const& problem, GroupNormTensors const& tensors, int threads);

// Dense tensors. grad_output and input have the problem's dtype and input layout, grad_input its
// output dtype and input layout; mean and rstd are [batch, groups], grad_weight and grad_bias
// [channels]. weight, bias and the gradients may be null: what is null is not computed.
struct GradientTensors {
  void const* grad_output = nullptr;
  void const* input = nullptr;
  float const* mean = nullptr;
  float const* rstd = nullptr;
  void const* weight = nullptr;
  void const* bias = nullptr;
  void* grad_input = nullptr;
  float* grad_weight = nullptr;
  float* grad_bias = nullptr;
};

// With a = act_before(x), h = (a - mean) rstd and g = grad act_after'(h weight + bias): grad_bias
// is the sum of g over samples and pixels, grad_weight that of g h, and grad_input is
// act_before'(x) rstd (weight g - A - h B), where A and B are a group's means of weight g and
// weight g h (Wu and He's forward pass, differentiated). As group_norm(); one activation at most.
void group_norm_gradients(GroupNormProblem const& problem, GradientTensors const& tensors,
                          int threads);

}  // namespace fusedconv::cpu
