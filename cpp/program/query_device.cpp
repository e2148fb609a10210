#include "program/query_device.hpp"

#include <cuda_runtime_api.h>

#include "fusedconv/check.hpp"

namespace fusedconv {

Device query_device(int index) {
  auto const attribute = [index](cudaDeviceAttr which) {
    int value = 0;
    FUSEDCONV_CUDA("query_device", cudaDeviceGetAttribute(&value, which, index));
    return value;
  };
  double const clock_hz = 1e3 * attribute(cudaDevAttrMemoryClockRate);
  double const bytes_per_transfer = attribute(cudaDevAttrGlobalMemoryBusWidth) / 8;
  return {.architecture = 10 * attribute(cudaDevAttrComputeCapabilityMajor) +
                          attribute(cudaDevAttrComputeCapabilityMinor),
          .multiprocessors = attribute(cudaDevAttrMultiProcessorCount),
          .shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin),
          .l2_bytes = attribute(cudaDevAttrL2CacheSize),
          .dram_bytes_per_second = 2 * clock_hz * bytes_per_transfer};  // at double data rate
}

}  // namespace fusedconv
