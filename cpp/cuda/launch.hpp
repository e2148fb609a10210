// Launches, and what the runtime is told for them once.
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

// Launches a kernel, with an attribute if there is one. An error is also the runtime's last one.
template <class... Parameters, class... Arguments>
cudaError_t launch_with(cudaLaunchAttribute* attribute, void (*kernel)(Parameters...), dim3 grid,
                        dim3 threads, std::size_t shared_bytes, cudaStream_t stream,
                        Arguments&&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attribute;
  config.numAttrs = attribute != nullptr ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

// In clusters of `cluster` blocks on compute capability 9.0.
template <class... Parameters, class... Arguments>
cudaError_t launch_clusters(void (*kernel)(Parameters...), int cluster, dim3 grid, dim3 threads,
                            std::size_t shared_bytes, cudaStream_t stream,
                            Arguments&&... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {unsigned(cluster), 1, 1};
  return launch_with(cluster > 1 ? &attribute : nullptr, kernel, grid, threads, shared_bytes,
                     stream, std::forward<Arguments>(arguments)...);
}

template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 threads, std::size_t shared_bytes,
                   cudaStream_t stream, Arguments&&... arguments) {
  return launch_with(nullptr, kernel, grid, threads, shared_bytes, stream,
                     std::forward<Arguments>(arguments)...);
}

}  // namespace fusedconv::device
