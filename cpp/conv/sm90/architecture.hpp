// Where the Hopper convolutions run. Host code without CUDA.
#pragma once

#include "conv/sm90/schedule.hpp"
#include "fusedconv/check.hpp"
#include "fusedconv/device.hpp"
#include "fusedconv/support.hpp"

namespace fusedconv::conv::sm90 {

inline Support supports_architecture(Device const& device) {
  if (device.architecture == kArchitecture) return Support::yes();
  return Support::no(detail::join("runs on compute capability ", kArchitecture / 10, ".",
                                  kArchitecture % 10, ", the device has ", device.architecture / 10,
                                  ".", device.architecture % 10));
}

}  // namespace fusedconv::conv::sm90
