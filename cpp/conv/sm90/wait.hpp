// Waiting at barriers in kernels whose registers are scarce.
#pragma once

#include <cstdint>

#include "cutlass/arch/barrier.h"

namespace fusedconv::conv::sm90 {

// As device::wait(), but with its loop inside one block of assembly: a loop of the compiler's
// changes how ptxas allots registers.
__device__ __forceinline__ void wait_for(uint64_t const* barrier, uint32_t parity) {
  cutlass::arch::ClusterBarrier::wait(barrier, parity);
}

}  // namespace fusedconv::conv::sm90
