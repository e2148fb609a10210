// Gradients through what has no statistics of groups, for tensors in the memory of the processor:
// activations, affine maps of channels, LayerNorm over the channels of each pixel.
#pragma once

#include "fusedconv/groupnorm.hpp"

namespace fusedconv::cpu {

// Dense tensors. grad_output and input have the problem's dtype and input layout, grad_input its
// output dtype and input layout; the gradients of parameters are [channels]. weight, bias and the
// gradients may be null: what is null is not computed.
struct UngroupedGradients {
  void const* grad_output = nullptr;
  void const* input = nullptr;
  void const* weight = nullptr;
  void const* bias = nullptr;
  void* grad_input = nullptr;
  float* grad_weight = nullptr;
  float* grad_bias = nullptr;
  // The sum of grad_input, which is then wanted too: that of a bias added in front.
  float* grad_front_bias = nullptr;
};

// With a = act_before(x) and g = grad act_after'(a weight + bias): grad_input is
// act_before'(x) weight g, grad_bias the sum of g over samples and pixels, grad_weight that of g a.
// One activation at most. The bits do not depend on `threads`. Throws InvalidArgument.
void map_gradients(GroupNormProblem const& problem, UngroupedGradients const& tensors, int threads);

// With h = (a - mean) rstd of each pixel and g = grad act_after'(h weight + bias): grad_input is
// act_before'(x) rstd (weight g - A - h B), where A and B are the means of weight g and weight g h
// over a pixel's channels (Ba, Kiros and Hinton's forward pass, differentiated); grad_weight is the
// sum of g h. As above, with any activations.
void layer_norm_gradients(GroupNormProblem const& problem, UngroupedGradients const& tensors,
                          int threads);

// What both do first; false, with sums of nothing written, where the tensors have no elements.
bool prepare(GroupNormProblem const& problem, UngroupedGradients const& tensors);

}  // namespace fusedconv::cpu
