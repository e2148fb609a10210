// Lines of outputs to shared memory, from where whole lines leave together.
#pragma once

#include <cstdint>

#include "conv/few/sums.hpp"
#include "cuda/async.hpp"
#include "cuda/pair.hpp"

namespace fusedconv::conv::few {

// Neighbouring elements by one access, and one of them, the first of what is given, where they are
// present, without a branch. Of shared memory, by the address there.
__device__ __forceinline__ void store_pair(uint32_t address, uint32_t pair, bool present) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %2, 0;\n"
      "@p st.shared.b32 [%0], %1;\n"
      "}" ::"r"(address),
      "r"(pair), "r"(int(present))
      : "memory");
}
__device__ __forceinline__ void store_pair(uint32_t address, float first, float second,
                                           bool present) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %3, 0;\n"
      "@p st.shared.v2.f32 [%0], {%1, %2};\n"
      "}" ::"r"(address),
      "f"(first), "f"(second), "r"(int(present))
      : "memory");
}
__device__ __forceinline__ void store_quad(uint32_t address, uint32_t const (&words)[4],
                                           bool present) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %5, 0;\n"
      "@p st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n"
      "}" ::"r"(address),
      "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]), "r"(int(present))
      : "memory");
}
__device__ __forceinline__ void store_element(uint32_t address, uint32_t pair, bool present) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      ".reg .b16 first, second;\n"
      "setp.ne.b32 p, %2, 0;\n"
      "mov.b32 {first, second}, %1;\n"
      "@p st.shared.b16 [%0], first;\n"
      "}" ::"r"(address),
      "r"(pair), "r"(int(present))
      : "memory");
}
__device__ __forceinline__ void store_element(uint32_t address, float value, bool present) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %2, 0;\n"
      "@p st.shared.f32 [%0], %1;\n"
      "}" ::"r"(address),
      "f"(value), "r"(int(present))
      : "memory");
}

// A lane's outputs of one line, from where the first of its first channel belongs on. Lines begin
// anywhere: where a run of outputs begins at the second of two that one access takes, accesses take
// its second and third and so on, the last of them the first of the next lane's, and the first of
// the first lane's is stored alone.
template <class T>
class StagedLine {
  static constexpr uint32_t kSize = sizeof(T);
  static constexpr int kPairs = kRun / 2;

 public:
  // channel: elements from one to the next. place: that of the first channel's line, of which alone
  // is asked whether it is odd. rest: outputs of the unit's that the line has, from the lane's
  // first on.
  __device__ __forceinline__ StagedLine(uint32_t address, int channel, int place, int rest)
      : address_(address),
        channel_(channel),
        place_(place),
        rest_(rest),
        lane_(int(threadIdx.x) % kWarp) {}

  // Where lines consist of whole vectors, and begin with one.
  __device__ __forceinline__ void store_vectors(Sums& sums) const {
    constexpr int kVector = 16 / int(kSize);
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
#pragma unroll
      for (int i = 0; i < kRun; i += kVector) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if constexpr (kSize == 2) {
            words[j] = device::from_pair<T>(sums.at(slot, i + 2 * j), sums.at(slot, i + 2 * j + 1));
          } else {
            words[j] = __float_as_uint(sums.at(slot, i + j));
          }
        }
        store_quad(address_ + uint32_t(slot * channel_ + i) * kSize, words, rest_ >= i + kVector);
      }
    }
  }

  // kWhole: the line has all of the unit's.
  template <bool kWhole>
  __device__ __forceinline__ void store(Sums& sums) const {
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      uint32_t const address = address_ + uint32_t(slot * channel_) * kSize;
      if ((place_ + slot * channel_) % 2 != 0) {
        store_run<kWhole, true>(sums, slot, address);
      } else {
        store_run<kWhole, false>(sums, slot, address);
      }
    }
  }

 private:
  template <bool kWhole, bool kOdd>
  __device__ __forceinline__ void store_run(Sums& sums, int slot, uint32_t address) const {
    if constexpr (kSize == 2) {
      store_words<kWhole, kOdd>(sums, slot, address);
    } else {
      store_floats<kWhole, kOdd>(sums, slot, address);
    }
  }

  template <bool kWhole, bool kOdd>
  __device__ __forceinline__ void store_words(Sums& sums, int slot, uint32_t address) const {
    static_assert(kPairs == 4);
    uint32_t words[kPairs + 1];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      words[i] = device::from_pair<T>(sums.at(slot, 2 * i), sums.at(slot, 2 * i + 1));
    }
    if constexpr (kOdd) {
      words[kPairs] = of_next_lane(words[0]);
      store_element(address, words[0], begins(kWhole));
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        words[i] = __funnelshift_r(words[i], words[i + 1], 8 * kSize);
      }
    }
    uint32_t const at = address + kOdd * kSize;
    int const rest = rest_ - kOdd;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      bool const has = (kWhole && i < kPairs - kOdd) || rest >= 2 * i + 2;
      store_pair(at + uint32_t(i) * 2 * kSize, words[i], has);
    }
    if constexpr (!kWhole) {
      int const last = rest >> 1;
      uint32_t const low = last % 2 == 0 ? words[0] : words[1];
      uint32_t const high = last % 2 == 0 ? words[2] : words[3];
      store_element(at + uint32_t(last) * 2 * kSize, last < 2 ? low : high,
                    rest % 2 != 0 && unsigned(rest) < unsigned(kRun));
    } else if constexpr (kOdd) {
      store_element(at + (kPairs - 1) * 2 * kSize, words[kPairs - 1], rest == kRun - 1);
    }
  }

  template <bool kWhole, bool kOdd>
  __device__ __forceinline__ void store_floats(Sums& sums, int slot, uint32_t address) const {
    float const next = kOdd ? of_next_lane(sums.at(slot, 0)) : 0.0f;
    if (kOdd) store_element(address, sums.at(slot, 0), begins(kWhole));
#pragma unroll
    for (int i = kOdd; i < kRun; i += 2) {
      uint32_t const at = address + uint32_t(i) * kSize;
      bool const last = i + 1 == kRun;
      bool const both = (kWhole && !last) || rest_ >= i + 2;
      store_pair(at, sums.at(slot, i), last ? next : sums.at(slot, (i + 1) % kRun), both);
      if (!kWhole || last) store_element(at, sums.at(slot, i), rest_ == i + 1);
    }
  }

  template <class U>
  __device__ __forceinline__ U of_next_lane(U value) const {
    return __shfl_sync(~0u, value, (lane_ + 1) % kWarp);
  }
  // Whether the lane is the first with outputs of its channel and has some.
  __device__ __forceinline__ bool begins(bool whole) const {
    return lane_ % 4 == 0 && (whole || rest_ > 0);
  }

  uint32_t address_;
  int channel_, place_, rest_, lane_;
};

}  // namespace fusedconv::conv::few
