#include "groupnorm/moments.hpp"
#include "cuda/launch.hpp"
#include "cuda/math.hpp"
#include "cuda/register_tile.hpp"
#include "cuda/tile.hpp"
#include "fusedconv/check.hpp"
#include "groupnorm/affine.hpp"
#include "groupnorm/launch.hpp"
#include "groupnorm/merge_partials.hpp"
#include "groupnorm/partition.hpp"
#include "groupnorm/passes.hpp"
#include "groupnorm/running_moments.hpp"

namespace fusedconv::groupnorm {
namespace {

using device::Moments;
using device::Pack;

// ---- moments, channels first ----

// A group is one contiguous run. Block (split, group):
// 1. Scalars up to the first 16-byte boundary and behind the last one.
// 2. kLoads vectors per thread and step: moments of the values in registers, then one merge.
// 3. Merge over the block; partial [group, split].
template <class T, bool kActivate>
__global__ void __launch_bounds__(kThreads)
    moments_channels_first(T const* __restrict__ input, Partial* __restrict__ partials,
                           int64_t group_size, int64_t split_size, int splits, Front front) {
  constexpr int kVector = 16 / sizeof(T);
  int64_t const group = blockIdx.x / splits;
  int64_t const split = blockIdx.x % splits;
  int64_t const begin = split * split_size;
  int64_t const size = min(split_size, group_size - begin);
  T const* const source = input + group * group_size + begin;

  int64_t const misaligned = int64_t(reinterpret_cast<uintptr_t>(source) % 16 / sizeof(T));
  int64_t const head = min(size, misaligned == 0 ? int64_t(0) : kVector - misaligned);
  int64_t const vectors = (size - head) / kVector;
  int64_t const tail = head + vectors * kVector;
  T const* const body = source + head;

  RunningMoments<T> running;
  for (int64_t i = threadIdx.x; i < head + (size - tail); i += kThreads) {
    T const value = source[i < head ? i : tail + (i - head)];
    float const x = before<kActivate>(front, device::to_float(value));
    float const one[1] = {x};
    running.add(one);
  }
  int64_t i = threadIdx.x;
  for (; i + (kLoads - 1) * kThreads < vectors; i += kLoads * kThreads) {
    Pack<T, kVector> loaded[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j)
      loaded[j] = Pack<T, kVector>::load(body + (i + j * kThreads) * kVector);
    float values[kLoads * kVector];
#pragma unroll
    for (int j = 0; j < kLoads * kVector; ++j) {
      values[j] =
          before<kActivate>(front, device::to_float(loaded[j / kVector].values[j % kVector]));
    }
    running.add(values);
  }
  for (; i < vectors; i += kThreads) {
    auto const loaded = Pack<T, kVector>::load(body + i * kVector);
    float values[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      values[j] = before<kActivate>(front, device::to_float(loaded.values[j]));
    }
    running.add(values);
  }
  Moments const total = device::merge_block<kThreads>(running.whole());
  if (threadIdx.x == 0) partials[group * splits + split] = total.partial();
}

// One warp per group merges its splits.
__global__ void __launch_bounds__(kThreads)
    finalize_channels_first(Partial const* __restrict__ partials, StatisticsTargets targets,
                            int64_t groups, int splits, float eps) {
  int64_t const group = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / 32;
  if (group >= groups) return;
  Moments total;
  for (int split = threadIdx.x % 32; split < splits; split += 32) {
    total.merge(Moments::of(partials[group * splits + split]));
  }
  total = device::merge_warp(total);
  if (threadIdx.x % 32 == 0) device::store(targets, group, device::statistics_of(total, eps));
}

// ---- moments, channels last ----

// Block (row block, slab of channels) of one sample; a thread keeps its channels.
// 1. moment_rows() rows per thread and step, the last ones fewer: per channel, moments of the
// values, about the block's first row.
// 2. Merge over the rows in a tree; partial [sample, row block, channel].
template <class T, int kVector, bool kActivate>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 4 : 3)
    moments_channels_last(T const* __restrict__ input, Partial* __restrict__ partials,
                          int64_t row_channels, int64_t pixels, int64_t block_rows, int row_blocks,
                          RowMap map, Front front) {
  extern __shared__ device::RelativeMoments shared[];  // [rows][columns * kVector]
  int64_t const sample = blockIdx.x / row_blocks;
  int64_t const row_block = blockIdx.x % row_blocks;
  int const map_row = threadIdx.x / map.columns;
  int const column = threadIdx.x % map.columns;
  int const channel = (int(blockIdx.y) * map.columns + column) * kVector;
  bool const active = map_row < map.rows && channel < row_channels;
  int64_t const end = min(pixels, (row_block + 1) * block_rows);

  RunningMoments<T> running[kVector];
  if (active) {
    T const* const first = input + (sample * pixels + row_block * block_rows) * row_channels;
    auto const reference = Pack<T, kVector>::load(first + channel);
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      running[v].start(before<kActivate>(front, device::value_of(reference, v)));
    }
    T const* source = first + map_row * row_channels + channel;
    int64_t const step = map.rows * row_channels;
    int left = (int(end - row_block * block_rows) - map_row + map.rows - 1) / map.rows;
    // By so many rows of the thread at a time, as long as there are.
    auto const take = [&](auto rows) {
      for (; left >= rows.value; left -= rows.value) {
        Pack<T, kVector> loaded[rows.value];
#pragma unroll
        for (auto& pack : loaded) {
          pack = Pack<T, kVector>::load(source);
          source += step;
        }
        float const count = running[0].count;
        float const weight = Moments::weight_of(count, float(rows.value));
#pragma unroll
        for (int v = 0; v < kVector; ++v) {
          float values[rows.value];
#pragma unroll
          for (int j = 0; j < rows.value; ++j) {
            values[j] = before<kActivate>(front, device::value_of(loaded[j], v));
          }
          running[v].count = count;  // one register for all
          running[v].add(values, weight);
        }
      }
    };
    take(std::integral_constant<int, moment_rows(sizeof(T))>{});
    if constexpr (moment_rows(sizeof(T)) > kLoads) take(std::integral_constant<int, kLoads>{});
    take(std::integral_constant<int, 1>{});
  }
  int const width = map.columns * kVector;
  if (map_row < map.rows) {
#pragma unroll
    for (int v = 0; v < kVector; ++v)
      shared[map_row * width + column * kVector + v] = running[v].relative();
  }
  for (int count = map.rows; count > 1;) {
    int const half = (count + 1) / 2;
    __syncthreads();
    for (int i = threadIdx.x; i < (count - half) * width; i += kThreads) {
      shared[i].merge(shared[half * width + i]);
    }
    count = half;
  }
  __syncthreads();
  int64_t const base = (sample * row_blocks + row_block) * row_channels;
  int64_t const slab = int64_t(blockIdx.y) * width;
  for (int i = threadIdx.x; i < width; i += kThreads) {
    if (slab + i >= row_channels) continue;
    T const first = input[(sample * pixels + row_block * block_rows) * row_channels + slab + i];
    float const reference =
        RunningMoments<T>::reference(before<kActivate>(front, device::to_float(first)));
    partials[base + slab + i] = Moments::of(reference, shared[i]).partial();
  }
}

// ---- launches ----

template <class T>
void launch_moments(GroupNormProblem const& p, void const* tensor, StatisticsTargets const& targets,
                    Partial* partials, cudaStream_t stream) {
  auto const* input = static_cast<T const*>(tensor);
  Front const front = {p.activation_before, p.quick()};
  bool const activate = front.activation != Activation::kIdentity;
  int64_t const groups = p.batch * p.groups;
  float const eps = float(p.eps);
  if (p.input_layout == Layout::kChannelsFirst) {
    Split const split = split_run(p.group_size(), sizeof(T), 16 / sizeof(T));
    dim3 const grid = device::checked_grid("moments_channels_first", groups * split.count);
    device::dispatch_bool(activate, [&](auto active) {
      device::launch(moments_channels_first<T, active.value>, grid, kThreads, 0, stream, input,
                     partials, p.group_size(), split.size, split.count, front);
    });
    FUSEDCONV_CUDA("moments_channels_first", cudaGetLastError());
    dim3 const blocks =
        device::checked_grid("finalize_channels_first", ceil_div(groups * 32, kThreads));
    device::launch(finalize_channels_first, blocks, kThreads, 0, stream, partials, targets, groups,
                   split.count, eps);
    FUSEDCONV_CUDA("finalize_channels_first", cudaGetLastError());
    return;
  }
  Split const split = split_rows(p);
  dispatch_last_vector<T>(last_vector(p, input, nullptr), [&](auto vector) {
    RowMap const map = RowMap::of(p.input_row_channels(), vector.value);
    dim3 const grid =
        device::checked_grid("moments_channels_last", p.batch * split.count, map.slabs);
    int const shared = map.rows * map.columns * vector.value * int(sizeof(device::RelativeMoments));
    device::dispatch_bool(activate, [&](auto active) {
      device::launch(moments_channels_last<T, vector.value, active.value>, grid, kThreads, shared,
                     stream, input, partials, p.input_row_channels(), p.pixels, split.size,
                     split.count, map, front);
    });
  });
  FUSEDCONV_CUDA("moments_channels_last", cudaGetLastError());
  merge_partials("moments_channels_last", p, {partials, split.count, p.input_row_channels()},
                 targets, stream);
}

}  // namespace

int64_t moments_workspace_bytes(GroupNormProblem const& p, int64_t samples) {
  int64_t const bytes = size_of(p.dtype);
  int64_t const partials = p.input_layout == Layout::kChannelsFirst
                               ? p.groups * split_run(p.group_size(), bytes, 16 / bytes).count
                               : p.input_row_channels() * split_rows(p).count;
  return samples * partials * int64_t(sizeof(Partial));
}

void moments(GroupNormProblem const& p, void const* input, StatisticsTargets const& targets,
             void* workspace, cudaStream_t stream) {
  check(p);
  if (p.batch == 0) return;
  device::dispatch_type(p.dtype, [&](auto zero) {
    launch_moments<decltype(zero)>(p, input, targets, static_cast<Partial*>(workspace), stream);
  });
}

}  // namespace fusedconv::groupnorm
