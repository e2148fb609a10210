// Launches whose price the processor or the gap between two kernels would pay each time.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <mutex>
#include <utility>

#include "fusedconv/launch_sequence.hpp"

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

// Whether kernels were compiled for compute capability 9.0 or later, so that join_stream() waits in
// them: on the same device they may come from PTX of an earlier one. All that are launched on a
// device are compiled alike, so that the first is asked, once for each device.
inline bool joins_stream(void const* kernel) {
  enum State : int { kUnknown, kNo, kYes };
  constexpr int kDevices = 64;  // beyond them none does
  static std::array<std::atomic<int>, kDevices> states{};
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kDevices) return false;
  int state = states[device].load(std::memory_order_relaxed);
  if (state == kUnknown) {
    cudaFuncAttributes attributes{};
    if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) {
      cudaGetLastError();  // which the launch's check would find
      return false;
    }
    state = attributes.ptxVersion >= 90 ? kYes : kNo;
    states[device].store(state, std::memory_order_relaxed);
  }
  return state == kYes;
}

// Launches a kernel, which begins with join_stream(): where that waits and the kernel follows
// another of its program, its blocks may start while the kernels before it on the stream end. In
// clusters of `cluster` blocks, on compute capability 9.0. An error is also the runtime's last one.
template <class... Parameters, class... Arguments>
cudaError_t launch_clusters(void (*kernel)(Parameters...), int cluster, dim3 grid, dim3 threads,
                            std::size_t shared_bytes, cudaStream_t stream,
                            Arguments&&... arguments) {
  cudaLaunchAttribute attributes[2]{};
  unsigned count = 0;
  if (LaunchSequence::follows() && joins_stream(reinterpret_cast<void const*>(kernel))) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {unsigned(cluster), 1, 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 threads, std::size_t shared_bytes,
                   cudaStream_t stream, Arguments&&... arguments) {
  return launch_clusters(kernel, 1, grid, threads, shared_bytes, stream,
                         std::forward<Arguments>(arguments)...);
}

// The first thing that every thread of a launched kernel does: lets the kernels behind it on the
// stream start as soon as all its blocks have, and waits until those before it have ended and what
// they wrote is seen. Nothing that any of them reads or writes may be written before, nor anything
// that they write be read.
__device__ __forceinline__ void join_stream() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace fusedconv::device
