// Gradients with the input and the output's gradient read from DRAM once; see streamed.hpp.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "groupnorm/backward.hpp"
#include "groupnorm/stream.hpp"

namespace fusedconv::groupnorm {

StreamPlan plan_streamed_gradients(GroupNormProblem const& problem, bool aligned, int device);

// Sums of a plane that streamed_gradients() leaves.
inline int64_t streamed_sums_per_plane(StreamPlan const& plan) { return plan.stream.run_chunks; }

// Fills tensors.grad_input, and partials [sample, channel, streamed_sums_per_plane()] with sums of
// g and g xhat. words: plan.words 64-bit words of workspace.
void streamed_gradients(StreamPlan const& plan, GroupNormProblem const& problem,
                        GradientTensors const& tensors, float2* partials, uint64_t* words,
                        cudaStream_t stream);

}  // namespace fusedconv::groupnorm
