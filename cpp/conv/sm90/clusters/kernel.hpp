// A whole forward pass: staging, products, sums across the cluster, normalisation.
#pragma once

#include "conv/sm90/clusters/epilogue.hpp"
#include "conv/sm90/clusters/products.hpp"
#include "conv/sm90/clusters/staging.hpp"

namespace fusedconv::conv::sm90::clusters {

template <Math kMath, int kTiles>
__global__ void __launch_bounds__(kThreads, kMostResident)
    convolve(__grid_constant__ Params const p) {
  using T = typename Instruction<kMath>::Element;
  extern __shared__ __align__(128) unsigned char shared[];
  auto* const sums = reinterpret_cast<float*>(shared + p.sums_offset);
  int const rank = int(blockIdx.x) & ((1 << p.log_blocks) - 1);  // in the cluster
  int const share = rank & (p.shares - 1);
  int sample, column_block;
  p.column_blocks(sample, column_block, int(blockIdx.x) >> p.log_blocks);
  Slab const slab(p, rank >> p.log_shares);
  int const first_channel = share * p.share_channels;
  int const share_end = min(first_channel + p.share_channels, p.channels);
  auto* const columns = reinterpret_cast<Column*>(shared + p.columns_offset);

  constexpr int kStep = kStepBytes / int(sizeof(T));
  // Copies of a chunk are under way while the one before is multiplied.
#pragma unroll 1
  for (int chunk = -1; chunk < p.chunks; ++chunk) {
    int const first = first_channel + chunk * p.chunk;
    unsigned char* const rows = shared + p.input_offset + (chunk & 1) * p.next_input;
    unsigned char* const next_rows = shared + p.input_offset + (~chunk & 1) * p.next_input;
    if (chunk == 0) load_columns<T>(p, column_block * p.columns, columns);
    if (chunk >= 0) {
      cutlass::arch::cp_async_wait<0>();
      __syncthreads();
      turn_chunk<kMath>(p, slab, shared, rows);
      __syncthreads();
    }
    if (int const next = first + p.chunk; chunk + 1 < p.chunks && next < share_end) {
      copy_chunk<T>(p, slab, Chunk<T>(p, slab, sample, column_block * p.columns, next, share_end),
                    shared, next_rows);
    }
    if (int const valid = min(p.chunk, share_end - first); chunk >= 0 && valid > 0) {
      multiply<kMath, kTiles>(p, slab, shared, rows, sums,
                              int(unsigned(valid + kStep - 1) / unsigned(kStep)), chunk == 0);
    }
  }
  if (p.shares > 1) {
    device::arrive_cluster_shared();
    device::wait_cluster();
  } else {
    __syncthreads();
  }
  if (p.vectors) {
    finish<T, 4>(p, slab, sample, column_block, rank, columns, sums);
  } else {
    finish<T, 1>(p, slab, sample, column_block, rank, columns, sums);
  }
  // Until the others have read this block's shared memory.
  device::wait_cluster();
}

}  // namespace fusedconv::conv::sm90::clusters
