// Whether kernels run as clusters of blocks.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>

namespace fusedconv::device {

// Whether what the current device runs of a kernel is code of compute capability 9.0 or more, whose
// blocks form clusters. The runtime is asked once for each kernel and device.
template <auto kKernel>
bool forms_clusters() {
  constexpr int kDevices = 64;  // beyond them it is asked each time
  static std::array<std::atomic<int>, kDevices> known{};
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  if (device < kDevices && known[device] != 0) return known[device] > 0;
  cudaFuncAttributes attributes{};
  if (cudaFuncGetAttributes(&attributes, kKernel) != cudaSuccess) return false;
  bool const result = attributes.ptxVersion >= 90;
  if (device < kDevices) known[device] = result ? 1 : -1;
  return result;
}

}  // namespace fusedconv::device
