// The current CUDA device, for a scope.
#pragma once

#include <cuda_runtime_api.h>

#include "fusedconv/check.hpp"

namespace fusedconv {

// Switches to a device for a scope. Leaves the current device alone where it is the right one.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    FUSEDCONV_CUDA("cudaGetDevice", cudaGetDevice(&previous_));
    if (previous_ == device) {
      previous_ = -1;
    } else {
      FUSEDCONV_CUDA("cudaSetDevice", cudaSetDevice(device));
    }
  }
  ~DeviceGuard() {
    if (previous_ >= 0) cudaSetDevice(previous_);
  }
  DeviceGuard(DeviceGuard const&) = delete;
  DeviceGuard& operator=(DeviceGuard const&) = delete;

 private:
  int previous_ = -1;
};

}  // namespace fusedconv
