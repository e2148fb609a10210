// Launches whose price the processor or the gap between two kernels would pay each time.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <mutex>
#include <utility>

namespace fusedconv::device {

// Lets a kernel have so many bytes of dynamic shared memory on the current device. The runtime is
// told once for each kernel and device, unless a launch needs more than those before.
template <auto kKernel>
cudaError_t allow_shared_bytes(int bytes) {
  constexpr int kDevices = 64;  // beyond them it is told each time
  static std::mutex mutex;
  static std::array<int, kDevices> allowed{};
  int device = 0;
  if (cudaError_t const status = cudaGetDevice(&device); status != cudaSuccess) return status;
  auto const allow = [](int most) {
    return cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
  };
  if (device >= kDevices) return allow(bytes);
  std::scoped_lock const lock(mutex);
  if (bytes <= allowed[device]) return cudaSuccess;
  cudaError_t const status = allow(bytes);
  if (status == cudaSuccess) allowed[device] = bytes;
  return status;
}

// Launches a kernel of compute capability 9.0 whose blocks may start while the last ones of the
// kernel before it on the stream end, in clusters of `cluster` blocks. Each of its threads calls
// wait_for_predecessors().
template <class... Parameters, class... Arguments>
cudaError_t launch_clusters_early(void (*kernel)(Parameters...), int cluster, dim3 grid,
                                  int threads, int shared_bytes, cudaStream_t stream,
                                  Arguments&&... arguments) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {unsigned(cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(unsigned(threads));
  config.dynamicSmemBytes = std::size_t(shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;
  cudaError_t const status =
      cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
  if (status != cudaSuccess) cudaGetLastError();  // which somebody else's check would find
  return status;
}

template <class... Parameters, class... Arguments>
cudaError_t launch_early(void (*kernel)(Parameters...), dim3 grid, int threads, int shared_bytes,
                         cudaStream_t stream, Arguments&&... arguments) {
  return launch_clusters_early(kernel, 1, grid, threads, shared_bytes, stream,
                               std::forward<Arguments>(arguments)...);
}

// Until the kernels before this one on the stream have ended and what they wrote is seen. Nothing
// that any of them reads or writes may be written, and nothing that they write be read, before.
__device__ __forceinline__ void wait_for_predecessors() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace fusedconv::device
