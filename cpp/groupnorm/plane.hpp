// A block's part of one plane, normalised.
#pragma once

#include <cstdint>

#include "cuda/math.hpp"
#include "groupnorm/affine.hpp"
#include "groupnorm/partition.hpp"

namespace fusedconv::groupnorm {

// `size` elements from `first` on, of one channel of one sample, by a block of kThreads. Vectors
// begin at multiples of their size in the tensor, wherever the run does; elements before and behind
// them go one by one. The output may be the input: each element is read by the thread that writes
// it, before it does. channel(), a ChannelAffine, is asked for once the first loads are under way.
template <class T, class U, int kVector, int kKnown, class ChannelOf>
__device__ __forceinline__ void normalize_run_of(T const* __restrict__ input,
                                                 U* __restrict__ output, ChannelOf&& channel_of,
                                                 Affine const& affine, int64_t first,
                                                 int64_t size) {
  using Values = device::Pack<T, kVector>;
  int64_t const head = min(size, int64_t(kVector - 1) - (first + kVector - 1) % kVector);
  T const* const source = input + first + head;
  U* const target = output + first + head;
  int64_t const vectors = (size - head) / kVector;
  Values loaded[kLoads];
  auto const load = [&](int64_t i) {
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      if (i + j * kThreads < vectors) {
        loaded[j] = Values::load(source + (i + j * kThreads) * kVector);
      }
    }
  };
  int64_t i = threadIdx.x;
  load(i);
  ChannelAffine const channel = channel_of();
  while (i < vectors) {
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      if (i + j * kThreads < vectors) {
        normalized_pack<U, kKnown>(loaded[j], channel, affine)
            .store(target + (i + j * kThreads) * kVector);
      }
    }
    i += kLoads * kThreads;
    load(i);
  }
  if constexpr (kVector > 1) {
    int64_t const tail = size - head - vectors * kVector;
    if (threadIdx.x < head + tail) {
      int64_t const element =
          threadIdx.x < head ? threadIdx.x - head : vectors * kVector + threadIdx.x - head;
      target[element] = device::from_float<U>(
          normalized<kKnown>(device::to_float(source[element]), channel, affine));
    }
  }
}

template <class T, class U, int kVector, int kKnown>
__device__ __forceinline__ void normalize_run(T const* __restrict__ input, U* __restrict__ output,
                                              ChannelAffine const& channel, Affine const& affine,
                                              int64_t first, int64_t size) {
  normalize_run_of<T, U, kVector, kKnown>(
      input, output, [&] { return channel; }, affine, first, size);
}

}  // namespace fusedconv::groupnorm
