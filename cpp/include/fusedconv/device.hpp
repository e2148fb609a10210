// What a kernel's configuration depends on of a device. The device need not be there.
#pragma once

#include <cstdint>

namespace fusedconv {

struct Device {
  int architecture = 0;  // compute capability, 90 for 9.0
  int multiprocessors = 0;
  int shared_bytes = 0;  // of one block, opted in
  int64_t l2_bytes = 0;
  double dram_bytes_per_second = 0.0;  // what the memory's clock and width give
};

}  // namespace fusedconv
