// What strict fp32 splits off its operands.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace fusedconv::conv::sm90::wgrad {

// output = input - input rounded to TF32, to nearest with ties to even, as tensor copies round what
// they land. Both are `lines` lines of so many columns, each padded to kLineAlignment bytes.
void small_part(int64_t lines, int64_t columns, float const* input, float* output,
                cudaStream_t stream);

}  // namespace fusedconv::conv::sm90::wgrad
