// From the sums of a cluster's blocks to the output: each block adds up, activates and normalises a
// part of its slab, one value a thread at a time: small code, for the reason that staging has.
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

// Where an output of a block's part lies, in the tensors' order.
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
      column = at / slab.outputs;
      index = image + int64_t(first_column + column) * p.output_pixels + slab.first_output +
              (at - column * slab.outputs);
    }
  }
};

// The sum of the slab's shares, in their order.
__device__ __forceinline__ float add_shares(Params const& p, float const* sum, int slab_rank) {
  uint32_t const address = device::shared_address(sum);
  // All on their way before the first is added.
  float parts[kMostBlocks];
#pragma unroll
  for (int k = 0; k < kMostBlocks; ++k) {
    if (k < p.shares) parts[k] = device::load_float_of_cluster(address, slab_rank + k);
  }
  float total = parts[0];
#pragma unroll
  for (int k = 1; k < kMostBlocks; ++k) {
    if (k < p.shares) total += parts[k];
  }
  return total;
}

// Scales and shifts, activates and stores a result.
template <class T>
__device__ __forceinline__ void store_result(Params const& p, int64_t index,
                                             groupnorm::Statistics const& group,
                                             Column const& column, float value) {
  auto const affine = groupnorm::ChannelAffine::of(group, column.weight, column.norm_bias);
  float values[1] = {fmaf(value - affine.mean, affine.scale, affine.shift)};
  groupnorm::activate_by_call(p.after, p.quick, values);
  if (p.writes_float) {
    static_cast<float*>(p.output)[index] = values[0];
  } else {
    static_cast<T*>(p.output)[index] = device::from_float<T>(values[0]);
  }
}

// The moments of all blocks of the cluster, merged in a fixed order, in every thread.
__device__ __forceinline__ groupnorm::Statistics statistics_of_cluster(
    Params const& p, device::Moments const& moments) {
  __shared__ alignas(16) device::Moments own;
  __shared__ groupnorm::Statistics group;
  static_assert(sizeof(device::Moments) == sizeof(float4));
  device::Moments total = device::merge_block<kThreads>(moments);
  if (threadIdx.x == 0) own = total;
  device::sync_cluster();
  if (threadIdx.x < 32) {
    total = {};
    if (int(threadIdx.x) < p.slabs * p.shares) {
      float4 const part = device::load_of_cluster(device::shared_address(&own), threadIdx.x);
      total = {part.x, part.y, part.z, part.w};
    }
    total = device::merge_warp<kMostBlocks>(total);
    if (threadIdx.x == 0) group = device::statistics_of(total, p.eps);
  }
  __syncthreads();
  return group;
}

template <class T>
__device__ __forceinline__ void finish(Params const& p, Slab const& slab, int sample,
                                       int column_block, int rank, Column const* columns,
                                       float* sums) {
  int const first_column = column_block * p.columns;
  int const all = slab.outputs * p.columns;
  int const share = rank % p.shares;
  int const part = (all + p.shares - 1) / p.shares;
  int const first = share * part + int(threadIdx.x);
  int const last = min(share * part + part, all);
  groupnorm::Statistics group{.mean = 0.0f, .low = 0.0f, .rstd = 1.0f};
  device::Moments moments;
#pragma unroll 1
  for (int at = first; at < last; at += kThreads) {
    Place const place(p, slab, sample, first_column, at);
    Column const column = columns[place.column];
    float values[1] = {add_shares(p, sums + at, rank - share) + column.bias};
    if (p.conv_output != nullptr) {
      static_cast<T*>(p.conv_output)[place.index] = device::from_float<T>(values[0]);
      // The backward pass begins with what is stored.
      values[0] = device::as_stored<T>(values[0]);
    }
    groupnorm::activate_by_call(p.before, p.quick, values);
    if (p.normalises) {
      moments.add(values);
      sums[at] = values[0];  // of its own part, which nobody else reads
    } else {
      store_result<T>(p, place.index, group, column, values[0]);
    }
  }
  if (p.normalises) {
    group = statistics_of_cluster(p, moments);
    if (rank == 0 && threadIdx.x == 0) {
      int64_t const index = int64_t(sample) * p.column_blocks.divisor + column_block;
      device::store({.mean = p.mean, .rstd = p.rstd}, index, group);
    }
#pragma unroll 1
    for (int at = first; at < last; at += kThreads) {
      Place const place(p, slab, sample, first_column, at);
      store_result<T>(p, place.index, group, columns[place.column], sums[at]);
    }
  }
  // Until the others have read this block's shared memory.
  device::sync_cluster();
}

}  // namespace fusedconv::conv::sm90::clusters
