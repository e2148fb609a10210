// A line's tiles, as blocks go over them, and the launch of these.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "conv/failure.hpp"
#include "cuda/early.hpp"
#include "cuda/launch.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90 {

// A block's tiles of all samples'. Blocks of other groups of the filter beside it have the same,
// which the cache has.
struct LineTiles {
  int tile, step, count;

  __device__ __forceinline__ LineTiles(int groups, int tile_count)
      : tile(int(blockIdx.x) / groups), step(int(gridDim.x) / groups), count(tile_count) {}

  __device__ __forceinline__ bool present() const { return tile < count; }
  __device__ __forceinline__ bool last() const { return tile + step >= count; }
  __device__ __forceinline__ void advance(int times = 1) { tile += times * step; }
};

// Launches a kernel whose blocks go over tiles by LineTiles. a: a row's arguments.
template <auto kKernel, class Arguments, class Params, class Maps>
void launch_line(Arguments const& a, int threads, Params const& params, Maps const& maps,
                 cudaStream_t stream) {
  auto const& s = a.config.schedule;
  int64_t const tiles = int64_t(a.batch) * s.tiles;
  constexpr int64_t kMost = 0x7fffffff - 0x10000;  // a step beyond them is counted to
  FUSEDCONV_CHECK(tiles <= kMost, a.config.row->name, ": tiles: got ", tiles, ", expected at most ",
                  kMost);
  // As many blocks for each group, one of each at least.
  int64_t const each = std::clamp<int64_t>(a.config.multiprocessors / s.groups, 1, tiles);
  conv::check_launch(a.config, a.batch, "cudaFuncSetAttribute",
                     device::allow_shared_bytes<kKernel>(s.shared_bytes));
  conv::check_launch(a.config, a.batch, "launch",
                     device::launch_early(a.begins_early, kKernel, unsigned(each * s.groups),
                                          threads, s.shared_bytes, stream, params, maps));
}

}  // namespace fusedconv::conv::sm90
