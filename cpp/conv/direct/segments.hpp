// Outputs on their way through shared memory, where lines begin anywhere. Those that are contiguous
// in memory, a segment, are so there; all lie at the same offset from a multiple of 16 bytes as in
// memory, since from a line, a plane or a channel to the next it is as far.
#pragma once

#include <cstdint>

#include "conv/direct/params.hpp"
#include "conv/direct/team.hpp"
#include "conv/segment.hpp"
#include "cuda/async.hpp"
#include "cuda/math.hpp"

namespace fusedconv::conv::direct {

template <class T>
struct Segments {
  T* target;  // the tile's first output of the first channel
  int first;  // its place in shared memory

  __device__ __forceinline__ Segments(Params const& p, Team<T> const& team, int channel)
      : target(tile_of(p, team, channel)),
        first(int(reinterpret_cast<uintptr_t>(target) / sizeof(T) % Segment<T>::kVector)) {}

  // Where outputs of a channel begin, counted in those of a tile.
  __device__ __forceinline__ static T* tile_of(Params const& p, Team<T> const& team, int channel) {
    int const z = team.place.origin[0] * p.axes[0].problem.stride;
    int const y = team.place.origin[1] * p.axes[1].problem.stride;
    int64_t const plane = int64_t(team.place.sample) * p.groups * p.output_channels + channel;
    return static_cast<T*>(p.output) + plane * p.output_pixels +
           (int64_t(z) * p.axes[1].problem.output + y) * p.axes[2].problem.output +
           team.place.origin[2];
  }
};

// Segment `index` of channel k; of length 0 where there are no outputs.
template <class T>
__device__ __forceinline__ Segment<T> segment_of(Params const& p, Team<T> const& team,
                                                 Segments<T> const& segments, int k, int index) {
  int z = index, y = 0;
  if (!p.joined) p.extent_h(z, y, index);
  int const height = p.axes[1].problem.output, width = p.axes[2].problem.output;
  int const at = segments.first + k * p.staged_channel + z * p.staged_plane + y * p.staged_line;
  Place const& place = team.place;
  int const left_y = height - place.origin[1] * p.axes[1].problem.stride - y;
  int const left_z = p.axes[0].problem.output - place.origin[0] * p.axes[0].problem.stride - z;
  int length =
      p.joined ? min(p.extent[1], left_y) * width : min(p.extent[2], width - place.origin[2]);
  if (left_z <= 0 || left_y <= 0) length = 0;
  return {.source = team.staged + at,
          .target = segments.target + k * p.output_pixels + (int64_t(z) * height + y) * width,
          .lead = at % Segment<T>::kVector,
          .length = length};
}

// Stores the staged outputs of the first `channels` channels. Two barriers of the block belong to
// it: before it, one that follows finish_staging(), and before shared memory is written again, one
// that follows wait_for_stores().
template <class T>
__device__ __forceinline__ void store_segments(Params const& p, Team<T> const& team,
                                               Segments<T> const& segments, int channels) {
#if __CUDA_ARCH__ >= 900
  int const count = channels * p.segments.divisor;
#pragma unroll 1
  for (int i = team.thread; i < count; i += p.team_threads) {
    int k, index;
    p.segments(k, index, i);
    store_by_bulk(segment_of(p, team, segments, k, index));
  }
#else
  int const count = channels * p.segments.divisor * p.segment_vectors.divisor;
#pragma unroll 1
  for (int i = team.thread; i < count; i += p.team_threads) {
    int k, index, vector;
    p.segment_vectors(index, vector, i);
    p.segments(k, index, index);
    store_vector(segment_of(p, team, segments, k, index), vector);
  }
#endif
}

__device__ __forceinline__ void finish_staging() {
#if __CUDA_ARCH__ >= 900
  device::fence_async_proxy();
#endif
}

__device__ __forceinline__ void wait_for_stores() {
#if __CUDA_ARCH__ >= 900
  device::wait_stores_read();
#endif
}

}  // namespace fusedconv::conv::direct
