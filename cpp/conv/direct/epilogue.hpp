// What becomes of outputs in registers: activation and moments.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "conv/activate.hpp"
#include "conv/direct/params.hpp"
#include "cuda/math.hpp"
#include "cuda/pair.hpp"
#include "groupnorm/moments.hpp"

namespace fusedconv::conv::direct {

// Whether each row of the filter is a sum of its own, which an addition joins: one chain over all
// products of a large filter would err by more than the vendor's sums in float32 do.
template <class T>
inline constexpr bool kSumsRows = sizeof(T) == 4;

template <int kRows, int kCount>
__device__ __forceinline__ void clear(float (&values)[kRows][kCount]) {
#pragma unroll
  for (auto& row : values) {
#pragma unroll
    for (float& value : row) value = 0.0f;
  }
}

template <int kRows, int kCount>
__device__ __forceinline__ void add(float (&values)[kRows][kCount],
                                    float const (&others)[kRows][kCount]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int v = 0; v < kCount; ++v) values[i][v] += others[i][v];
  }
}

template <class T, int kRows, int kCount>
__device__ __forceinline__ void round_as_stored(float (&values)[kRows][kCount]) {
#pragma unroll
  for (auto& row : values) {
#pragma unroll
    for (float& value : row) value = device::as_stored<T>(value);
  }
}

// Neighbouring outputs as memory has them. Those of 16 bits are pairs in words, which the compiler
// would otherwise take apart and keep in twice the registers.
template <class T, int kCount>
struct StoredRow {
  static constexpr bool kPairs = sizeof(T) == 2 && kCount % 2 == 0;
  static constexpr int kPerWord = kPairs ? 2 : 1;
  using Word = std::conditional_t<kPairs, uint32_t, T>;
  Word words[kCount / kPerWord];

  __device__ __forceinline__ explicit StoredRow(float const (&values)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount / kPerWord; ++i) {
      if constexpr (kPairs) {
        words[i] = device::from_pair<T>(values[2 * i], values[2 * i + 1]);
      } else {
        words[i] = device::from_float<T>(values[i]);
      }
    }
  }
  __device__ __forceinline__ void values(float (&result)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount / kPerWord; ++i) {
      if constexpr (kPairs) {
        float2 const pair = device::to_pair<T>(words[i]);
        result[2 * i] = pair.x;
        result[2 * i + 1] = pair.y;
      } else {
        result[i] = device::to_float(words[i]);
      }
    }
  }
  // 16 bytes, by one access, which the compiler would at times split.
  __device__ __forceinline__ void store(T* target) const {
    static_assert(sizeof(words) == 16);
    uint32_t bits[4];
    memcpy(bits, words, sizeof(bits));
    __stwb(reinterpret_cast<uint4*>(target), make_uint4(bits[0], bits[1], bits[2], bits[3]));
  }
  // To element `at` of shared memory.
  __device__ __forceinline__ void stage(T* shared, int at) const {
    T* const target = shared + at;
    if (!kPairs || at % 2 == 0) {
#pragma unroll
      for (int i = 0; i < kCount / kPerWord; ++i) reinterpret_cast<Word*>(target)[i] = words[i];
      return;
    }
    if constexpr (kPairs) {
      stage_value(target, 0);
#pragma unroll
      for (int i = 1; i < kCount / 2; ++i) {
        reinterpret_cast<uint32_t*>(target - 1)[i] = __funnelshift_r(words[i - 1], words[i], 16);
      }
      stage_value(target, kCount - 1);
    }
  }
  // The first `count` of them.
  __device__ __forceinline__ void stage_first(int count, T* target) const {
#pragma unroll
    for (int v = 0; v < kCount - 1; ++v) {
      if (v < count) stage_value(target, v);
    }
  }

 private:
  __device__ __forceinline__ void stage_value(T* target, int v) const {
    if constexpr (kPairs) {
      reinterpret_cast<uint16_t*>(target)[v] = uint16_t(words[v / 2] >> v % 2 * 16);
    } else {
      target[v] = words[v];
    }
  }
};

}  // namespace fusedconv::conv::direct
