// The pass in front of kernels that take the gradient from registers.
#pragma once

#include <cuda_runtime_api.h>

#include "conv/sm90/boxes/weight/rows.hpp"

namespace fusedconv::conv::sm90::boxes::weight {

// The input, dense and channels last, rounded to TF32: of each slab kUnit channels after another,
// of each channel its positions as the instruction reads them, swizzled; zeros where there are
// none. packed: schedule.packed_bytes.
void pack_input(Config const& config, void const* input, void* packed, cudaStream_t stream);

}  // namespace fusedconv::conv::sm90::boxes::weight
