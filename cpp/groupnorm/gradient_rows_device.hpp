// What passes over rows of gradients, tensors that are channels last, have in common.
#pragma once

#include "groupnorm/gradient_device.hpp"
#include "groupnorm/partition.hpp"

namespace fusedconv::groupnorm {

// Where a thread is: block (row block, slab) of a sample.
struct Place {
  int64_t sample, row_block, row, end;
  int map_row, column, slab, channel;

  __device__ __forceinline__ Place(unsigned block, RowMap const& map, int vector, int64_t pixels,
                                   int64_t block_rows, int row_blocks, int channels)
      : sample(block / row_blocks),
        row_block(block % row_blocks),
        map_row(int(threadIdx.x) / map.columns),
        column(int(threadIdx.x) % map.columns),
        slab(int(blockIdx.y) * map.columns * vector),
        channel(slab + column * vector) {
    row = row_block * block_rows + map_row;
    bool const serves = map_row < map.rows && channel < channels;
    end = serves ? min(pixels, (row_block + 1) * block_rows) : 0;
  }
};

// Fills table, [kVector][map.columns], with entry(channel) of the slab's channels: each is read
// once by a block, and without conflicts between banks by its threads.
template <int kVector, class Entry, class F>
__device__ __forceinline__ void fill_table(Entry* table, RowMap const& map, int slab, int channels,
                                           F&& entry) {
  for (int c = int(threadIdx.x); c < map.columns * kVector; c += kThreads) {
    if (slab + c < channels) table[c % kVector * map.columns + c / kVector] = entry(slab + c);
  }
}

__device__ __forceinline__ float4 entry_of(Channel const& channel) {
  return make_float4(channel.mean, channel.rstd, channel.weight, channel.bias);
}
__device__ __forceinline__ Channel channel_of(float4 const& entry) {
  return {entry.x, entry.y, entry.z, entry.w};
}

// Adds each column's values over the rows of the map, [map.rows][width], in a fixed order; the
// first row has the totals then.
template <class V, class F>
__device__ __forceinline__ void add_rows(V* values, int rows, int width, F&& add) {
  for (int count = rows; count > 1;) {
    int const half = (count + 1) / 2;
    __syncthreads();
    for (int i = int(threadIdx.x); i < (count - half) * width; i += kThreads) {
      add(values[i], values[half * width + i]);
    }
    count = half;
  }
  __syncthreads();
}

// What a thread's channels are mapped by, and their groups' terms, through tables that fill
// `shared`, which is free behind it once the block is.
template <int kVector>
struct RowGradient {
  Channel channels[kVector];
  GroupTerms terms[kVector];

  __device__ __forceinline__ RowGradient(float4* shared, Place const& place, RowMap const& map,
                                         GradientAffine const& affine,
                                         GroupTerms const* all_terms) {
    auto* const groups = reinterpret_cast<GroupTerms*>(shared + map.columns * kVector);
    fill_table<kVector>(shared, map, place.slab, affine.channels, [&](int channel) {
      return entry_of(Channel::of(affine, place.sample, channel));
    });
    fill_table<kVector>(groups, map, place.slab, affine.channels, [&](int channel) {
      return all_terms[place.sample * affine.groups + channel / affine.channels_per_group];
    });
    __syncthreads();
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      channels[v] = channel_of(shared[v * map.columns + place.column]);
      terms[v] = groups[v * map.columns + place.column];
    }
  }

  static int table_bytes(int width) { return width * int(sizeof(float4) + sizeof(GroupTerms)); }

  template <int kKnown, class T, class G>
  __device__ __forceinline__ device::Pack<T, kVector> of(device::Pack<T, kVector> const& input,
                                                         device::Pack<G, kVector> const& grad,
                                                         GradientAffine const& affine) const {
    return grad_input_of<kKnown>(
        input, grad, [&](int v) { return channels[v]; }, [&](int v) { return terms[v]; }, affine);
  }
};

// Leaves the sums over a block's rows of what each thread has summed up of its channels, in `rows`,
// [map.rows][width], in sums, [sample, channel, row block].
template <int kVector>
__device__ __forceinline__ void store_sums(float const (&totals)[kVector], float* rows,
                                           Place const& place, RowMap const& map, int channels,
                                           int row_blocks, float* sums) {
  int const width = map.columns * kVector;
  __syncthreads();
  if (place.map_row < map.rows) {
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      rows[place.map_row * width + place.column * kVector + v] = totals[v];
    }
  }
  add_rows(rows, map.rows, width, [](float& a, float b) { a += b; });
  for (int i = int(threadIdx.x); i < width; i += kThreads) {
    int64_t const channel = place.slab + i;
    if (channel >= channels) continue;
    sums[(place.sample * channels + channel) * row_blocks + place.row_block] = rows[i];
  }
}

}  // namespace fusedconv::groupnorm
