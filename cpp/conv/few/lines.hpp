// Lines of outputs to shared memory, from where whole lines leave together.
#pragma once

#include <cstdint>

#include "conv/few/sums.hpp"
#include "cuda/async.hpp"
#include "cuda/pair.hpp"

namespace fusedconv::conv::few {

// Neighbouring elements by one access, and one of them, where it is present, without a branch. Of
// shared memory, by the address there.
template <class T>
__device__ __forceinline__ void store_pair(uint32_t address, float first, float second,
                                           bool present) {
  if constexpr (sizeof(T) == 2) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %2, 0;\n"
        "@p st.shared.b32 [%0], %1;\n"
        "}" ::"r"(address),
        "r"(device::from_pair<T>(first, second)), "r"(int(present))
        : "memory");
  } else {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %3, 0;\n"
        "@p st.shared.v2.f32 [%0], {%1, %2};\n"
        "}" ::"r"(address),
        "f"(first), "f"(second), "r"(int(present))
        : "memory");
  }
}
template <class T>
__device__ __forceinline__ void store_element(uint32_t address, float value, bool present) {
  if constexpr (sizeof(T) == 2) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %2, 0;\n"
        "@p st.shared.b16 [%0], %1;\n"
        "}" ::"r"(address),
        "h"(uint16_t(device::from_pair<T>(value, value))), "r"(int(present))
        : "memory");
  } else {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %2, 0;\n"
        "@p st.shared.f32 [%0], %1;\n"
        "}" ::"r"(address),
        "f"(value), "r"(int(present))
        : "memory");
  }
}

// A lane's outputs of one line, from where the first of its first channel belongs on. Lines begin
// anywhere: where an output of an even place along width is not the first of two that one access
// takes, it is the second, and the first is the neighbouring lane's.
template <class T>
class StagedLine {
  static constexpr uint32_t kSize = sizeof(T);
  static constexpr uint32_t kHighBytes = kHigh * kStride * kSize;

 public:
  // channel: elements from one to the next.
  __device__ __forceinline__ StagedLine(uint32_t address, uint32_t channel, Columns const& columns)
      : address_(address), channel_(channel), columns_(columns) {}

  template <bool kWhole>
  __device__ __forceinline__ void store(Sums& sums) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // Of all lanes alike.
      bool const odd = ((address_ / kSize + uint32_t(i) * channel_) & 1u) != 0;
      if (odd) {
        store_across<kWhole>(sums, i);
        store_across<kWhole>(sums, i + 2);
      } else {
        store_own<kWhole>(sums, i);
        store_own<kWhole>(sums, i + 2);
      }
    }
  }

 private:
  __device__ __forceinline__ uint32_t address_of(int slot) const {
    return address_ + (uint32_t(slot / 2 * 8 + slot % 2) * channel_) * kSize;
  }

  template <bool kWhole>
  __device__ __forceinline__ void store_own(Sums& sums, int slot) const {
    uint32_t const address = address_of(slot);
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      uint32_t const at = address + uint32_t(high) * kHighBytes;
      float const even = sums.at(slot, high, 0);
      bool const both = kWhole || columns_.has(high, 1);
      store_pair<T>(at, even, sums.at(slot, high, 1), both);
      if (!kWhole) store_element<T>(at, even, !both && columns_.has(high, 0));
    }
  }

  template <bool kWhole>
  __device__ __forceinline__ void store_across(Sums& sums, int slot) const {
    int const lane = int(threadIdx.x) % 32;
    bool const first = lane < 4, last = lane >= 28;
    float const odds[2] = {sums.at(slot, 0, 1), sums.at(slot, 1, 1)};
    // Of the quotient before; the first lanes' of the second eight is the last lanes' of the first.
    float const left[2] = {__shfl_sync(~0u, odds[0], (lane - 4) & 31),
                           __shfl_sync(~0u, last ? odds[0] : odds[1], (lane - 4) & 31)};
    uint32_t const address = address_of(slot);
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      uint32_t const at = address + uint32_t(high) * kHighBytes;
      bool const has_left = high == 1 || !first;
      float const even = sums.at(slot, high, 0);
      bool const own = kWhole || columns_.has(high, 0);
      store_pair<T>(at - kSize, left[high], even, own && has_left);
      if (high == 0) store_element<T>(at, even, own && first);
      if (!kWhole) {
        store_element<T>(at - kSize, left[high], !own && has_left && columns_.has(high, -1));
      }
    }
    store_element<T>(address + kHighBytes + kSize, odds[1], last && (kWhole || columns_.has(1, 1)));
  }

  uint32_t address_, channel_;
  Columns columns_;
};

}  // namespace fusedconv::conv::few
