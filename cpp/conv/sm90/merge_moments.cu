#include "conv/sm90/merge_moments.hpp"

#include "conv/sm90/passes.hpp"
#include "conv/sm90/raster.hpp"

namespace fusedconv::conv::sm90 {
namespace {

// Of a tile of a raster, the positions that are pixels.
struct RasterPixels {
  Raster raster;

  __device__ __forceinline__ int operator()(int tile) const {
    int const strip = tile / raster.strip_warpgroup_tiles;
    int const begin = (tile - strip * raster.strip_warpgroup_tiles) * raster.block_n;
    int const width = min(raster.strip_width, raster.q - strip * raster.strip_width);
    return before(width, begin + raster.block_n) - before(width, begin);
  }

 private:
  // Positions before a position of a strip that are pixels.
  __device__ __forceinline__ int before(int width, int position) const {
    int row, column, slice;
    raster.pitch_w(row, column, min(position, raster.positions));
    raster.pitch_h(slice, row, row);
    int const rows = slice * raster.p + min(row, raster.p);
    return rows * width + (row < raster.p ? min(column, width) : 0);
  }
};

}  // namespace

void merge_moments(Config const& config, GroupNormProblem const& problem,
                   groupnorm::Partial const* partials, groupnorm::StatisticsTargets const& targets,
                   cudaStream_t stream) {
  Raster const raster = Raster::of(config.problem, config.schedule);
  launch_merge_moments(problem, raster.warpgroup_tiles, RasterPixels{raster}, partials, targets,
                       stream);
}

}  // namespace fusedconv::conv::sm90
