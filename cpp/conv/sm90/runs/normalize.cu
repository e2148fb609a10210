// Normalisation that merges the convolution's partial moments itself: where there are few, merging
// them again in each block takes less time than a kernel that does it once.
#include <cstdint>
#include <type_traits>

#include "conv/sm90/runs/passes.hpp"
#include "conv/sm90/runs/tile_parts.hpp"
#include "cuda/launch.hpp"
#include "cuda/tile.hpp"
#include "fusedconv/check.hpp"
#include "groupnorm/launch.hpp"
#include "groupnorm/merge_partials_device.hpp"
#include "groupnorm/plane.hpp"

namespace fusedconv::conv::sm90::runs {
namespace {

using groupnorm::Affine;
using groupnorm::ChannelAffine;
using groupnorm::kMergeThreads;

static_assert(kMergeThreads == groupnorm::kThreads, "blocks that merge and normalise");
// Of a group's partial moments, so many each block may merge.
constexpr int64_t kMostMergedInPassing = 4 * kMergeThreads;
static_assert(kMostMergedInPassing <= groupnorm::kMostByFewThreads, "the same bits in any batch");

constexpr int kResidentThreads = 2048;  // of a multiprocessor

// Block (split, plane).
template <class T, class U, int kVector, bool kActivate>
__global__ void __launch_bounds__(kMergeThreads)
    normalize_merging_kernel(groupnorm::MergeParams const merge, TileParts const parts,
                             groupnorm::StatisticsTargets targets, T const* __restrict__ input,
                             U* __restrict__ output, Affine affine, int64_t pixels,
                             int64_t split_size, int splits) {
  __shared__ groupnorm::Statistics shared;
  int const plane = int(blockIdx.x / unsigned(splits));
  int const split = int(blockIdx.x % unsigned(splits));
  int const channel = plane % affine.channels;
  int const group = plane / affine.channels_per_group;
  auto const merged = groupnorm::merged_statistics<kMergeThreads>(merge, parts, group);
  if (threadIdx.x == 0) {
    shared = merged;
    if (split == 0 && channel % affine.channels_per_group == 0) {
      device::store(targets, group, merged);
    }
  }
  __syncthreads();
  int64_t const begin = split * split_size;
  groupnorm::normalize_run<T, U, kVector, kActivate>(
      input, output, ChannelAffine::of(affine, shared, channel), affine, plane * pixels + begin,
      min(split_size, pixels - begin));
}

groupnorm::Split split_of(GroupNormProblem const& p) {
  int64_t const bytes = size_of(p.dtype);
  return groupnorm::split_run(p.pixels, bytes, 16 / bytes, groupnorm::kRunBytes);
}

}  // namespace

bool merges_in_passing(Config const& config, GroupNormProblem const& p) {
  int64_t const resident = int64_t(config.multiprocessors) * kResidentThreads / kMergeThreads;
  return config.schedule.tiles * p.channels_per_group() <= kMostMergedInPassing &&
         p.batch * p.channels * split_of(p).count <= resident;
}

void normalize_merging(Config const& config, GroupNormProblem const& p,
                       NormalizeTensors const& tensors, cudaStream_t stream) {
  groupnorm::check(p);
  auto const merge = groupnorm::MergeParams::of("sm90 normalize_merging", p, config.schedule.tiles);
  TileParts const parts = TileParts::of(config, tensors.partials);
  groupnorm::StatisticsTargets const targets{.mean = tensors.mean, .rstd = tensors.rstd};
  Affine const affine = groupnorm::affine_of(p, tensors.weight, tensors.bias, nullptr);
  groupnorm::Split const split = split_of(p);
  dim3 const grid =
      device::checked_grid("sm90 normalize_merging", p.batch * p.channels * split.count);
  groupnorm::dispatch_kernel(p, [&](auto zero, auto active) {
    using T = decltype(zero);
    auto const launch = [&](auto result) {
      using U = decltype(result);
      constexpr int kVector = 16 / sizeof(T);
      bool const vectors = device::is_aligned(tensors.input, 16) &&
                           device::is_aligned(tensors.output, kVector * int64_t(sizeof(U)));
      groupnorm::dispatch_last_vector<T>(vectors ? kVector : 1, [&](auto vector) {
        FUSEDCONV_CUDA(
            "sm90 normalize_merging",
            device::launch(&normalize_merging_kernel<T, U, vector.value, active.value>, grid,
                           kMergeThreads, 0, stream, merge, parts, targets,
                           static_cast<T const*>(tensors.input), static_cast<U*>(tensors.output),
                           affine, p.pixels, split.size, split.count));
      });
    };
    if (p.output_dtype == p.dtype) {
      launch(zero);
    } else {
      launch(float{});
    }
  });
}

}  // namespace fusedconv::conv::sm90::runs
