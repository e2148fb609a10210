// What a kernel's configuration depends on of a device. The device need not be there.
#pragma once

#include <cstdint>

namespace fusedconv {

// That the system takes of each block's shared memory.
inline constexpr int kSystemSharedBytes = 1 << 10;

struct Device {
  int architecture = 0;  // compute capability, 90 for 9.0
  int multiprocessors = 0;
  int shared_bytes = 0;  // of one block, opted in
  int64_t l2_bytes = 0;
  double dram_bytes_per_second = 0.0;  // what the memory's clock and width give

  // Of each of so many blocks that share a multiprocessor.
  constexpr int shared_bytes_of(int blocks) const {
    return (shared_bytes + kSystemSharedBytes) / blocks - kSystemSharedBytes;
  }
};

}  // namespace fusedconv
