// A channel's staged outputs to where they belong, in parts that threads share.
#pragma once

#include "conv/segment.hpp"
#include "cuda/async.hpp"

namespace fusedconv::conv::few {

// Whole 16 bytes of a segment, by a bulk copy, which goes on when the thread does.
template <class T>
__device__ __forceinline__ void store_whole(Segment<T> const& segment) {
  constexpr int kVector = Segment<T>::kVector;
  int const head = -segment.lead & (kVector - 1), end = segment.lead + segment.length;
  int const count = (end & ~(kVector - 1)) - segment.lead - head;
  if (count > 0) {
    device::bulk_store(segment.target + head, device::shared_address(segment.source + head),
                       unsigned(count) * unsigned(sizeof(T)));
  }
}

// One element of what lies around them, if there is an `index`-th: of the 16 bytes that the segment
// begins in, and of those that it ends in.
template <class T>
__device__ __forceinline__ void store_edge(Segment<T> const& segment, int index) {
  constexpr int kVector = Segment<T>::kVector;
  bool const behind = index >= kVector;
  int const block = behind ? (segment.lead + segment.length) & ~(kVector - 1) : 0;
  int const at = block + index % kVector - segment.lead;
  if (at < 0 || at >= segment.length || (!behind && segment.lead == 0)) return;
  segment.target[at] = segment.source[at];
}

}  // namespace fusedconv::conv::few
