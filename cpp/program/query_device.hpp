// What a device of this machine is.
#pragma once

#include "fusedconv/device.hpp"

namespace fusedconv {

// index: as CUDA counts devices. Throws KernelFailure where there is no such device.
Device query_device(int index);

}  // namespace fusedconv
