// Partial moments that the convolution left by tile and channel, to statistics by sample and group.
#include <cstdint>

#include "conv/sm90/passes.hpp"
#include "conv/sm90/raster.hpp"
#include "cuda/tile.hpp"
#include "cutlass/fast_math.h"
#include "fusedconv/check.hpp"
#include "groupnorm/moments.hpp"

namespace fusedconv::conv::sm90 {
namespace {

constexpr int kThreads = 256;

struct Params {
  Raster raster;
  cutlass::FastDivmod channels_per_group;
  int channels, groups;
  float eps;
};

// Positions before a position of a strip that are pixels.
__device__ __forceinline__ int valid_before(Raster const& raster, int width, int position) {
  int row, column, slice;
  raster.pitch_w(row, column, min(position, raster.positions));
  raster.pitch_h(slice, row, row);
  int const rows = slice * raster.p + min(row, raster.p);
  return rows * width + (row < raster.p ? min(column, width) : 0);
}

// One block per sample and group merges its tiles' channels.
__global__ void __launch_bounds__(kThreads)
    merge_moments_kernel(Params const p, groupnorm::Partial const* __restrict__ partials,
                         groupnorm::StatisticsTargets targets) {
  Raster const& raster = p.raster;
  int const sample = int(blockIdx.x) / p.groups;
  int const first = int(blockIdx.x) % p.groups * p.channels_per_group.divisor;
  int const count = raster.warpgroup_tiles * p.channels_per_group.divisor;
  device::Moments running;
  for (int i = threadIdx.x; i < count; i += kThreads) {
    int tile, channel;
    p.channels_per_group(tile, channel, i);
    groupnorm::Partial const partial =
        partials[(int64_t(sample) * raster.warpgroup_tiles + tile) * p.channels + first + channel];
    int const strip = tile / raster.strip_warpgroup_tiles;
    int const begin = (tile - strip * raster.strip_warpgroup_tiles) * raster.block_n;
    int const width = min(raster.strip_width, raster.q - strip * raster.strip_width);
    int const valid =
        valid_before(raster, width, begin + raster.block_n) - valid_before(raster, width, begin);
    running.merge(device::Moments::of(float(valid), partial));
  }
  device::Moments const total = device::merge_block<kThreads>(running);
  if (threadIdx.x == 0) {
    device::store(targets, blockIdx.x, device::statistics_of(total, p.eps));
  }
}

}  // namespace

void merge_moments(Config const& config, GroupNormProblem const& problem,
                   groupnorm::Partial const* partials, groupnorm::StatisticsTargets const& targets,
                   cudaStream_t stream) {
  Params const p{.raster = Raster::of(config.problem, config.schedule),
                 .channels_per_group = cutlass::FastDivmod(int(problem.channels_per_group())),
                 .channels = config.problem.k,
                 .groups = int(problem.groups),
                 .eps = float(problem.eps)};
  dim3 const grid =
      device::checked_grid("sm90 merge_moments", problem.batch * int64_t(problem.groups));
  merge_moments_kernel<<<grid, kThreads, 0, stream>>>(p, partials, targets);
  FUSEDCONV_CUDA("sm90 merge_moments", cudaGetLastError());
}

}  // namespace fusedconv::conv::sm90
