// From the sums of a cluster's blocks to the output: each block adds up, activates and normalises a
// part of its slab, a thread one value or four neighbours at a time: small code, for the reason
// that staging has.
#pragma once

#include <cstdint>

#include "conv/sm90/clusters/params.hpp"
#include "cuda/async.hpp"
#include "cuda/cluster.hpp"
#include "cuda/math.hpp"
#include "groupnorm/affine.hpp"
#include "groupnorm/by_call.hpp"
#include "groupnorm/moments.hpp"

namespace fusedconv::conv::sm90::clusters {

// What an output channel is shifted and scaled by, in shared memory.
struct Column {
  float bias, weight, norm_bias;
};
static_assert(sizeof(Column) == Memory::kColumnBytes);

template <class T>
__device__ __forceinline__ void load_columns(Params const& p, int first_column, Column* columns) {
#pragma unroll 1
  for (int i = threadIdx.x; i < p.columns; i += kThreads) {
    int const channel = first_column + i;
    auto const affine = [&](void const* values, float otherwise) {
      return values ? device::load_as_float(values, channel, p.affine_dtype) : otherwise;
    };
    columns[i] = {p.bias ? device::to_float(static_cast<T const*>(p.bias)[channel]) : 0.0f,
                  affine(p.norm_weight, 1.0f), affine(p.norm_bias, 0.0f)};
  }
}

// Where neighbours of a block's part lie, in the tensors' order: channels of a pixel or pixels of a
// channel.
struct Place {
  int column;
  int64_t index;  // in the tensor

  __device__ __forceinline__ Place(Params const& p, Slab const& slab, int sample, int first_column,
                                   int at) {
    int64_t const image = int64_t(sample) * p.output_channels * p.output_pixels;
    if (p.channels_last) {
      int pixel;
      p.by_columns(pixel, column, at);
      index =
          image + int64_t(slab.first_output + pixel) * p.output_channels + first_column + column;
    } else {
      int pixel;
      (slab.is_last ? p.by_last_outputs : p.by_outputs)(column, pixel, at);
      index = image + int64_t(first_column + column) * p.output_pixels + slab.first_output + pixel;
    }
  }
};

// The sums of the slab's shares, in their order.
template <int kCount>
__device__ __forceinline__ void add_shares(Params const& p, float const* sums, int slab_rank,
                                           float (&values)[kCount]) {
  uint32_t const address = device::shared_address(sums);
  // All on their way before the first is added.
  float parts[kMostBlocks][kCount];
#pragma unroll
  for (int k = 0; k < kMostBlocks; ++k) {
    if (k >= p.shares) continue;
    if constexpr (kCount == 4) {
      float4 const four = device::load_of_cluster(address, slab_rank + k);
      parts[k][0] = four.x, parts[k][1] = four.y, parts[k][2] = four.z, parts[k][3] = four.w;
    } else {
      parts[k][0] = device::load_float_of_cluster(address, slab_rank + k);
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = parts[0][i];
#pragma unroll
  for (int k = 1; k < kMostBlocks; ++k) {
    if (k >= p.shares) continue;
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] += parts[k][i];
  }
}

// Scales and shifts, activates and stores results.
template <class T, int kCount>
__device__ __forceinline__ void store_results(Params const& p, Place const& place,
                                              groupnorm::Statistics const& group,
                                              Column const* columns, float (&values)[kCount]) {
  int const next = p.channels_last ? 1 : 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    Column const& column = columns[place.column + i * next];
    auto const affine = groupnorm::ChannelAffine::of(group, column.weight, column.norm_bias);
    values[i] = fmaf(values[i] - affine.mean, affine.scale, affine.shift);
  }
  groupnorm::activate_by_call(p.after, p.quick, values);
  if (p.writes_float) {
    device::Pack<float, kCount>::of(values).store(static_cast<float*>(p.output) + place.index);
  } else {
    device::Pack<T, kCount>::of(values).store(static_cast<T*>(p.output) + place.index);
  }
}

// The sum over a warp's lanes, in each.
template <int kCount>
__device__ __forceinline__ void add_lanes(float (&values)[kCount]) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
#pragma unroll
    for (float& value : values) value += __shfl_xor_sync(~0u, value, step);
  }
}

// The moments of all warps of the cluster, merged in a fixed order, in every thread: about their
// mean, of which the first one's is off by so little that a float holds it.
__device__ __forceinline__ groupnorm::Statistics statistics_of_cluster(Params const& p,
                                                                       device::Moments const& own) {
  __shared__ alignas(16) device::Moments moments[kWarps];
  __shared__ groupnorm::Statistics group;
  static_assert(sizeof(device::Moments) == sizeof(float4));
  int const lane = int(threadIdx.x) % 32, warp = uniform(int(threadIdx.x) / 32);
  if (lane == 0) moments[warp] = own;
  device::arrive_cluster_shared();
  device::wait_cluster();
  if (warp == 0) {
    constexpr int kMost = kMostBlocks * kWarps / 32;
    float4 parts[kMost];
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      int const part = i * 32 + lane;
      parts[i] = {};
      if (part < kWarps << p.log_blocks) {
        parts[i] =
            device::load_of_cluster(device::shared_address(&moments[part % kWarps]), part / kWarps);
      }
    }
    float const reference = __shfl_sync(~0u, parts[0].y, 0);
    float sums[2] = {};
#pragma unroll
    for (float4& part : parts) {
      part.y = part.x > 0.0f ? (part.y - reference) + part.z : 0.0f;
      sums[0] += part.x;
      sums[1] = fmaf(part.x, part.y, sums[1]);
    }
    add_lanes(sums);
    float const offset = sums[1] / sums[0];
    float squares[1] = {};
#pragma unroll
    for (float4 const& part : parts) {
      float const delta = part.y - offset;
      squares[0] += fmaf(delta * delta, part.x, part.w);
    }
    add_lanes(squares);
    if (lane == 0) {
      group = device::statistics_of({sums[0], reference, offset, squares[0]}, p.eps);
    }
  }
  device::arrive_cluster_relaxed();
  __syncthreads();
  return group;
}

// Of the values of lanes that have some inside, of which there is one.
template <int kCount>
__device__ __forceinline__ float mean_of_warp(float const (&values)[kCount], bool inside) {
  float sum[1] = {0.0f};
#pragma unroll
  for (float const value : values) sum[0] += inside ? value : 0.0f;
  add_lanes(sum);
  int const lanes = __popc(__ballot_sync(~0u, inside));
  return sum[0] / float(lanes * kCount);
}

// Ends with an arrival at the cluster's barrier: from there on this block reads nothing of others.
template <class T, int kCount>
__device__ __forceinline__ void finish(Params const& p, Slab const& slab, int sample,
                                       int column_block, int rank, Column const* columns,
                                       float* sums) {
  int const first_column = column_block * p.columns;
  int const all = slab.outputs * p.columns;
  int const share = rank & (p.shares - 1);
  int const part = (((all - 1) >> p.log_shares) + kCount) / kCount * kCount;
  int const lane = int(threadIdx.x) % 32;
  int const first = share * part + int(threadIdx.x) * kCount;
  int const last = min(share * part + part, all);
  groupnorm::Statistics group{.mean = 0.0f, .low = 0.0f, .rstd = 1.0f};
  device::ShiftedMoments moments;
  float count = 0.0f;
  // Whole warps, whose moments are about the same value.
#pragma unroll 1
  for (int at = first; at - lane * kCount < last; at += kThreads * kCount) {
    float values[kCount] = {};
    bool const inside = at < last;
    if (inside) {
      Place const place(p, slab, sample, first_column, at);
      add_shares(p, sums + at, rank - share, values);
      int const next = p.channels_last ? 1 : 0;
#pragma unroll
      for (int i = 0; i < kCount; ++i) values[i] += columns[place.column + i * next].bias;
      if (p.conv_output != nullptr) {
        device::Pack<T, kCount>::of(values).store(static_cast<T*>(p.conv_output) + place.index);
        // The backward pass begins with what is stored.
#pragma unroll
        for (float& value : values) value = device::as_stored<T>(value);
      }
      groupnorm::activate_by_call(p.before, p.quick, values);
      if (!p.normalises) store_results<T>(p, place, group, columns, values);
    }
    if (p.normalises) {
      // The mean of those that come first: a single one may be far off the rest, as one of few that
      // are not zero, and the difference of squares would be all rounding.
      if (at - first == 0) moments.shift = mean_of_warp(values, inside);
      if (inside) {
        // Of its own part, which nobody else reads.
        device::Pack<float, kCount>::of(values).store(sums + at);
        // Sums of their own: a long chain of equal values rounds the same way each time.
        device::ShiftedMoments own{moments.shift};
#pragma unroll
        for (float const value : values) own.add(value);
        moments.sum += own.sum;
        moments.squares += own.squares;
        count += kCount;
      }
    }
  }
  if (!p.normalises) {
    device::arrive_cluster_relaxed();
    return;
  }
  float totals[3] = {count, moments.sum, moments.squares};
  add_lanes(totals);
  group = statistics_of_cluster(
      p, totals[0] > 0.0f ? device::shifted_moments(totals[0], moments.shift, totals[1], totals[2])
                          : device::Moments{});
  if (rank == 0 && threadIdx.x == 0) {
    int64_t const index = int64_t(sample) * p.column_blocks.divisor + column_block;
    device::store({.mean = p.mean, .rstd = p.rstd}, index, group);
  }
#pragma unroll 1
  for (int at = first; at < last; at += kThreads * kCount) {
    float values[kCount];
    device::Pack<float, kCount>::load(sums + at).to_floats(values);
    Place const place(p, slab, sample, first_column, at);
    store_results<T>(p, place, group, columns, values);
  }
}

}  // namespace fusedconv::conv::sm90::clusters
