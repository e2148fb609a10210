// A team of threads with its tile, channels first, and its filters in shared memory.
#pragma once

#include <cstdint>

#include "conv/direct/params.hpp"
#include "cuda/math.hpp"

namespace fusedconv::conv::direct {

// A team's tile and its part of shared memory.
template <class T>
struct Team {
  Place place;
  int thread, group, first_channel;  // the latter of the group's output channels
  bool active;
  float* weights;
  float* bias;
  float* box;
  T* staged;

  __device__ __forceinline__ Team(Params const& p, unsigned char* shared, int team, int team_bytes,
                                  int index)
      : Team(p, shared + team * team_bytes, index < p.tile_count,
             index < p.tile_count ? index : 0) {}

  // Of the output channels from the team's first on, those that there are.
  __device__ __forceinline__ int channels_from(Params const& p, int first) const {
    return active ? p.output_channels - first_channel - first : 0;
  }
  // Of the team's output channel k, over all groups.
  __device__ __forceinline__ int channel(Params const& p, int k) const {
    return group * p.output_channels + first_channel + k;
  }

 private:
  __device__ __forceinline__ Team(Params const& p, unsigned char* shared, bool active, int rest)
      : place(p, rest), thread(threadIdx.x % p.team_threads), active(active) {
    int block;
    p.channel_blocks(rest, block, rest);
    p.conv_groups(place.sample, group, rest);
    first_channel = block * p.block_channels;
    weights = reinterpret_cast<float*>(shared);
    bias = weights + p.weight_floats;
    box = bias + p.bias_floats;
    staged = reinterpret_cast<T*>(box + p.channels * p.box_channel);
  }
};

// [channel, depth, height, output channel, width], rows of whole quads: what output channels that
// a thread computes at once need of a row of the filter is contiguous. And their bias.
template <class T>
__device__ __forceinline__ void stage_weights(Params const& p, Team<T> const& team) {
  T const* const weight = static_cast<T const*>(p.weight);
  for (int i = team.thread; i < p.weight_floats; i += p.team_threads) {
    int rest, x, y, z, k;
    p.kernel_w(rest, x, i);
    p.weight_columns(rest, k, rest);
    p.kernel_h(rest, y, rest);
    p.kernel_d(rest, z, rest);
    k += team.first_channel;
    float value = 0.0f;
    if (x < p.axes[2].problem.kernel && k < p.output_channels) {
      int64_t const channel = int64_t(team.group) * p.channels + rest;
      value = device::to_float(
          weight[channel * p.source.stride_c + k * p.source.stride_k + z * p.source.stride_t +
                 y * p.source.stride_r + x * p.source.stride_s]);
    }
    team.weights[i] = value;
  }
  for (int k = team.thread; k < p.block_channels; k += p.team_threads) {
    bool const present = p.bias != nullptr && team.first_channel + k < p.output_channels;
    team.bias[k] =
        present ? device::to_float(static_cast<T const*>(p.bias)[team.channel(p, k)]) : 0.0f;
  }
}

}  // namespace fusedconv::conv::direct
