// The passes of gradient_sums() and input_gradient() over tensors that are channels last.
#pragma once

#include <cuda_runtime_api.h>

#include "groupnorm/gradient.hpp"

namespace fusedconv::groupnorm {

void sum_gradients_of_rows(GroupNormProblem const& problem, GradientTensors const& tensors,
                           GradientSum* partials, cudaStream_t stream);
void input_gradient_of_rows(GroupNormProblem const& problem, GradientTensors const& tensors,
                            GroupTerms const* terms, cudaStream_t stream);
// Into planes, channels first.
void input_gradient_of_rows_in_lines(GroupNormProblem const& problem,
                                     GradientTensors const& tensors, GroupTerms const* terms,
                                     cudaStream_t stream);

}  // namespace fusedconv::groupnorm
