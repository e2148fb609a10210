// Elements that are contiguous in memory, on their way there through shared memory, where they lie
// at the same offset from a multiple of 16 bytes.
#pragma once

#include <cstdint>

#include "cuda/async.hpp"
#include "cuda/math.hpp"

namespace fusedconv::conv {

template <class T>
struct Segment {
  static constexpr int kVector = 16 / int(sizeof(T));
  T const* source;
  T* target;
  int lead;  // elements behind a multiple of 16 bytes
  int length;
};

// By one thread: whole 16 bytes by a bulk copy, which goes on when the thread does, and what lies
// around them.
template <class T>
__device__ __forceinline__ void store_by_bulk(Segment<T> const& segment) {
  constexpr int kVector = Segment<T>::kVector;
  int const head = min(-segment.lead & (kVector - 1), segment.length);
  int const tail = (segment.length - head) % kVector;
  int const middle = segment.length - head - tail;
  if (middle > 0) {
    device::bulk_store(segment.target + head, device::shared_address(segment.source + head),
                       unsigned(middle) * unsigned(sizeof(T)));
  }
#pragma unroll
  for (int i = 0; i < kVector - 1; ++i) {
    if (i < head) segment.target[i] = segment.source[i];
    if (i < tail) segment.target[head + middle + i] = segment.source[head + middle + i];
  }
}

// 16 bytes, or what the segment has of them.
template <class T>
__device__ __forceinline__ void store_vector(Segment<T> const& segment, int index) {
  constexpr int kVector = Segment<T>::kVector;
  int const begin = index * kVector - segment.lead;
  if (begin >= 0 && begin + kVector <= segment.length) {
    device::Pack<T, kVector>::load(segment.source + begin).store(segment.target + begin);
  } else {
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      if (begin + v >= 0 && begin + v < segment.length) {
        segment.target[begin + v] = segment.source[begin + v];
      }
    }
  }
}

}  // namespace fusedconv::conv
