// Launches that begin beside the one in front of them.
//
// A kernel that releases early lets the next launch on its stream begin while it runs, if that one
// was launched so. Who begins early waits before it reads what the one in front wrote; that one, in
// turn, was launched behind all else, so that nothing else is waited for.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <utility>

#include "cuda/launch.hpp"

// Helpers that a kernel's unit does not use, or that are empty for older devices.
#pragma nv_diag_suppress 177

namespace fusedconv::device {

#ifdef __CUDACC__
// Of a kernel that may be in front, by all of its threads, those that exit before apart.
__device__ __forceinline__ void release_early() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Until the launch in front has ended and its results are visible. Returns at once in a launch that
// did not begin early.
__device__ __forceinline__ void wait_for_launch_in_front() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
#endif

// As device::launch(). early: beside the launch in front, which releases early.
template <class... Parameters, class... Arguments>
cudaError_t launch_early(bool early, void (*kernel)(Parameters...), dim3 grid, dim3 threads,
                         std::size_t shared_bytes, cudaStream_t stream, Arguments&&... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return launch_with(early ? &attribute : nullptr, kernel, grid, threads, shared_bytes, stream,
                     std::forward<Arguments>(arguments)...);
}

}  // namespace fusedconv::device
