#include "groupnorm/groupnorm.hpp"

#include "cuda/math.hpp"
#include "cuda/tile.hpp"
#include "fusedconv/check.hpp"
#include "groupnorm/affine.hpp"
#include "groupnorm/moments.hpp"
#include "groupnorm/row_map.hpp"
#include "groupnorm/running_moments.hpp"

namespace fusedconv::groupnorm {
namespace {

using device::Moments;
using device::Pack;

constexpr int kLoads = 4;  // 16-byte loads in flight per thread

// ---- moments, channels first -------------------------------------------------------------------

// A group is one contiguous run. Block (split, group):
// 1. Scalars up to the first 16-byte boundary and behind the last one.
// 2. kLoads vectors per thread and step: moments of the values in registers, then one merge.
// 3. Merge over the block; partial [group, split].
template <class T, bool kActivate>
__global__ void __launch_bounds__(kThreads)
    moments_channels_first(T const* __restrict__ input, Partial* __restrict__ partials,
                           int64_t group_size, int64_t split_size, int splits,
                           Activation activation) {
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
    float const x = before<kActivate>(activation, device::to_float(value));
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
          before<kActivate>(activation, device::to_float(loaded[j / kVector].values[j % kVector]));
    }
    running.add(values);
  }
  for (; i < vectors; i += kThreads) {
    auto const loaded = Pack<T, kVector>::load(body + i * kVector);
    float values[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      values[j] = before<kActivate>(activation, device::to_float(loaded.values[j]));
    }
    running.add(values);
  }
  Moments const total = device::merge_block<kThreads>(running.whole());
  if (threadIdx.x == 0) partials[group * splits + split] = total.partial();
}

// One warp per group merges its splits.
__global__ void __launch_bounds__(kThreads)
    finalize_channels_first(Partial const* __restrict__ partials, StatisticsTargets targets,
                            int64_t groups, int64_t group_size, int64_t split_size, int splits,
                            float eps) {
  int64_t const group = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / 32;
  if (group >= groups) return;
  Moments total;
  for (int split = threadIdx.x % 32; split < splits; split += 32) {
    float const count = float(min(split_size, group_size - split * split_size));
    total.merge(Moments::of(count, partials[group * splits + split]));
  }
  total = device::merge_warp(total);
  if (threadIdx.x % 32 == 0) device::store(targets, group, device::statistics_of(total, eps));
}

// ---- moments, channels last --------------------------------------------------------------------

// Block (row block, slab of channels) of one sample; a thread keeps its channels.
// 1. kLoads rows per thread and step: per channel, moments of the values, about the block's first
// row.
// 2. Merge over the lanes in a tree; partial [sample, row block, channel].
template <class T, int kVector, bool kActivate>
__global__ void __launch_bounds__(kThreads)
    moments_channels_last(T const* __restrict__ input, Partial* __restrict__ partials,
                          int64_t row_channels, int64_t pixels, int64_t block_rows, int row_blocks,
                          RowMap map, Activation activation) {
  extern __shared__ device::RelativeMoments shared[];  // [lanes][columns * kVector]
  int64_t const sample = blockIdx.x / row_blocks;
  int64_t const row_block = blockIdx.x % row_blocks;
  int const lane = threadIdx.x / map.columns;
  int const column = threadIdx.x % map.columns;
  int const channel = (int(blockIdx.y) * map.columns + column) * kVector;
  bool const active = lane < map.lanes && channel < row_channels;
  int64_t const end = min(pixels, (row_block + 1) * block_rows);

  RunningMoments<T> running[kVector];
  if (active) {
    T const* const source = input + sample * pixels * row_channels + channel;
    auto const first = Pack<T, kVector>::load(source + row_block * block_rows * row_channels);
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      running[v].start(before<kActivate>(activation, device::to_float(first.values[v])));
    }
    int64_t row = row_block * block_rows + lane;
    for (; row + (kLoads - 1) * map.lanes < end; row += kLoads * map.lanes) {
      Pack<T, kVector> loaded[kLoads];
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        loaded[j] = Pack<T, kVector>::load(source + (row + j * map.lanes) * row_channels);
      }
      float const weight = Moments::weight_of(running[0].count, float(kLoads));
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        float values[kLoads];
#pragma unroll
        for (int j = 0; j < kLoads; ++j) {
          values[j] = before<kActivate>(activation, device::to_float(loaded[j].values[v]));
        }
        running[v].add(values, weight);
      }
    }
    for (; row < end; row += map.lanes) {
      auto const loaded = Pack<T, kVector>::load(source + row * row_channels);
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        float const x = before<kActivate>(activation, device::to_float(loaded.values[v]));
        float const one[1] = {x};
        running[v].add(one, Moments::weight_of(running[v].count, 1.0f));
      }
    }
  }
  int const width = map.columns * kVector;
  if (lane < map.lanes) {
#pragma unroll
    for (int v = 0; v < kVector; ++v)
      shared[lane * width + column * kVector + v] = running[v].relative();
  }
  for (int count = map.lanes; count > 1;) {
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
        RunningMoments<T>::reference(before<kActivate>(activation, device::to_float(first)));
    partials[base + slab + i] = Moments::of(reference, shared[i]).partial();
  }
}

// One block per group merges row blocks and the group's channels.
__global__ void __launch_bounds__(kThreads)
    finalize_channels_last(Partial const* __restrict__ partials, StatisticsTargets targets,
                           int groups, int channels_per_group, int64_t row_channels, int64_t pixels,
                           int64_t block_rows, int row_blocks, float eps) {
  int64_t const sample = blockIdx.x / groups;
  int const first_channel = int(blockIdx.x % groups) * channels_per_group;
  Moments running;
  for (int i = threadIdx.x; i < row_blocks * channels_per_group; i += kThreads) {
    int64_t const row_block = i / channels_per_group;
    int const channel = first_channel + i % channels_per_group;
    float const count = float(min(block_rows, pixels - row_block * block_rows));
    running.merge(
        Moments::of(count, partials[(sample * row_blocks + row_block) * row_channels + channel]));
  }
  Moments const total = device::merge_block<kThreads>(running);
  if (threadIdx.x == 0) device::store(targets, blockIdx.x, device::statistics_of(total, eps));
}

// ---- normalisation -----------------------------------------------------------------------------

// Block (split, plane): one channel of one sample is contiguous.
template <class T, class U, int kVector, bool kActivate>
__global__ void __launch_bounds__(kThreads)
    normalize_planes(T const* __restrict__ input, U* __restrict__ output, Affine affine,
                     int64_t pixels, int64_t split_size, int splits) {
  int const plane = int(blockIdx.x / unsigned(splits));
  int64_t const begin = int64_t(blockIdx.x % unsigned(splits)) * split_size;
  int64_t const size = min(split_size, pixels - begin);
  auto const channel = ChannelAffine::of(affine, plane / affine.channels, plane % affine.channels);
  T const* const source = input + int64_t(plane) * pixels + begin;
  U* const target = output + int64_t(plane) * pixels + begin;
  int64_t const vectors = size / kVector;
  auto const store = [&](int64_t vector, Pack<T, kVector> const& loaded) {
    Pack<U, kVector> result;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      result.values[j] = device::from_float<U>(
          normalized<kActivate>(device::to_float(loaded.values[j]), channel, affine));
    }
    result.store(target + vector * kVector);
  };
  int64_t i = threadIdx.x;
  for (; i + (kLoads - 1) * kThreads < vectors; i += kLoads * kThreads) {
    Pack<T, kVector> loaded[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      loaded[j] = Pack<T, kVector>::load(source + (i + j * kThreads) * kVector);
    }
#pragma unroll
    for (int j = 0; j < kLoads; ++j) store(i + j * kThreads, loaded[j]);
  }
  for (; i < vectors; i += kThreads) store(i, Pack<T, kVector>::load(source + i * kVector));
}

// Small planes: the whole tensor as one run, the channel found for each vector.
template <class T, class U, int kVector, bool kActivate>
__global__ void __launch_bounds__(kThreads)
    normalize_small_planes(T const* __restrict__ input, U* __restrict__ output, Affine affine,
                           unsigned pixels, unsigned planes) {
  unsigned const vectors_per_plane = pixels / kVector;
  int64_t const vectors = int64_t(planes) * vectors_per_plane;
  for (int64_t v = int64_t(blockIdx.x) * kThreads + threadIdx.x; v < vectors;
       v += int64_t(gridDim.x) * kThreads) {
    int64_t const i = v * kVector;
    int const plane = vectors < (int64_t(1) << 32) ? int(unsigned(v) / vectors_per_plane)
                                                   : int(v / vectors_per_plane);
    auto const channel =
        ChannelAffine::of(affine, plane / affine.channels, plane % affine.channels);
    auto const loaded = Pack<T, kVector>::load(input + i);
    Pack<U, kVector> result;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      result.values[j] = device::from_float<U>(
          normalized<kActivate>(device::to_float(loaded.values[j]), channel, affine));
    }
    result.store(output + i);
  }
}

// Channels last to channels last: a thread keeps its channels and goes down the rows.
template <class T, class U, int kVector, bool kActivate>
__global__ void __launch_bounds__(kThreads)
    normalize_rows(T const* __restrict__ input, U* __restrict__ output, Affine affine,
                   int64_t row_channels, int64_t pixels, int64_t block_rows, int row_blocks,
                   RowMap map) {
  int64_t const sample = blockIdx.x / row_blocks;
  int64_t const row_block = blockIdx.x % row_blocks;
  int const lane = threadIdx.x / map.columns;
  int const channel = int(blockIdx.y * map.columns + threadIdx.x % map.columns) * kVector;
  if (lane >= map.lanes || channel >= affine.channels) return;
  ChannelAffine channels[kVector];
#pragma unroll
  for (int v = 0; v < kVector; ++v) channels[v] = ChannelAffine::of(affine, sample, channel + v);

  T const* const source = input + sample * pixels * row_channels + channel;
  U* const target = output + sample * pixels * affine.channels + channel;
  int64_t const end = min(pixels, (row_block + 1) * block_rows);
  auto const store = [&](int64_t row, Pack<T, kVector> const& loaded) {
    Pack<U, kVector> result;
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      result.values[v] = device::from_float<U>(
          normalized<kActivate>(device::to_float(loaded.values[v]), channels[v], affine));
    }
    result.store(target + row * affine.channels);
  };
  int64_t row = row_block * block_rows + lane;
  for (; row + (kLoads - 1) * map.lanes < end; row += kLoads * map.lanes) {
    Pack<T, kVector> loaded[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      loaded[j] = Pack<T, kVector>::load(source + (row + j * map.lanes) * row_channels);
    }
#pragma unroll
    for (int j = 0; j < kLoads; ++j) store(row + j * map.lanes, loaded[j]);
  }
  for (; row < end; row += map.lanes) {
    store(row, Pack<T, kVector>::load(source + row * row_channels));
  }
}

// Channels last to channels first:
// 1. A block reads kPixels rows of kChannels channels, 16 bytes at a time.
// 2. It normalises in registers and turns the tile in shared memory.
// 3. It writes runs along pixels, kVector at a time.
template <class T, class U, int kVector, bool kActivate>
__global__ void __launch_bounds__(device::kTileThreads)
    normalize_to_channels_first(T const* __restrict__ input, U* __restrict__ output, Affine affine,
                                int64_t row_channels, int64_t pixels, unsigned pixel_tiles) {
  using Tile = device::TransposeTile<U>;
  using Word = typename Tile::Word;
  constexpr int kPerWord = Tile::kPerWord;
  __shared__ Tile tile;
  int64_t const sample = blockIdx.x / pixel_tiles;
  int64_t const pixel0 = int64_t(blockIdx.x % pixel_tiles) * Tile::kPixels;
  int const channel0 = int(blockIdx.y) * Tile::kChannels;

  constexpr int kIn = 16 / sizeof(T);
  constexpr int kInLanes = Tile::kChannels / kIn;
  static_assert(device::kTileThreads % kInLanes == 0, "a thread keeps its channels");
  constexpr int kWordRows = device::kTileThreads / kInLanes;  // rows of words per step
  constexpr int kSteps = Tile::kPixels / kPerWord / kWordRows;
  constexpr int kAhead = kSteps < 8 / kPerWord ? kSteps : 8 / kPerWord;  // loads in flight
  static_assert(kSteps % kAhead == 0, "whole rounds of loads");
  int const channel = threadIdx.x % kInLanes * kIn;
  int const row0 = threadIdx.x / kInLanes;
  if (channel0 + channel < row_channels) {
    T const* const source = input + (sample * pixels + pixel0) * row_channels + channel0 + channel;
    ChannelAffine constants[kIn];
#pragma unroll
    for (int v = 0; v < kIn; ++v) {
      constants[v] = ChannelAffine::of(affine, sample, channel0 + channel + v);
    }
#pragma unroll 1
    for (int step = 0; step < kSteps; step += kAhead) {
      Pack<T, kIn> loaded[kAhead][kPerWord];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
#pragma unroll
        for (int k = 0; k < kPerWord; ++k) {
          int const pixel = (row0 + (step + j) * kWordRows) * kPerWord + k;
          if (pixel0 + pixel < pixels) {
            loaded[j][k] = Pack<T, kIn>::load(source + pixel * row_channels);
          }
        }
      }
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
#pragma unroll
        for (int v = 0; v < kIn; ++v) {
          Word word;
#pragma unroll
          for (int k = 0; k < kPerWord; ++k) {
            word.pixels[k] = device::from_float<U>(normalized<kActivate>(
                device::to_float(loaded[j][k].values[v]), constants[v], affine));
          }
          tile.put(channel + v, row0 + (step + j) * kWordRows, word);
        }
      }
    }
  }
  __syncthreads();

  constexpr int kLanes = Tile::kPixels / kVector;
  U* const target = output + (sample * affine.channels + channel0) * pixels + pixel0;
#pragma unroll 4
  for (int index = threadIdx.x; index < Tile::kChannels * kLanes; index += device::kTileThreads) {
    int const out_channel = index / kLanes;
    int const pixel = index % kLanes * kVector;
    if (channel0 + out_channel >= affine.channels || pixel0 + pixel >= pixels) continue;
    Pack<U, kVector> pack;
    if constexpr (kVector < kPerWord) {
      pack.values[0] = tile.element(out_channel, pixel);
    } else {
#pragma unroll
      for (int i = 0; i < kVector; i += kPerWord) {
        Word const word = tile.get(out_channel, (pixel + i) / kPerWord);
#pragma unroll
        for (int k = 0; k < kPerWord; ++k) pack.values[i + k] = word.pixels[k];
      }
    }
    pack.store(target + out_channel * pixels + pixel);
  }
}

// ---- launches ----------------------------------------------------------------------------------

// Row blocks must come out the same for every number of samples, so that the bits of a result do
// not depend on how a batch is cut.
Split split_rows(Passes const& passes) {
  int64_t const row_bytes = passes.row_channels * size_of(passes.problem.dtype);
  return split_run(passes.problem.pixels, row_bytes, 1);
}

int last_vector(Passes const& passes, void const* input, void const* output) {
  int const vector = int(16 / size_of(passes.problem.dtype));
  bool const aligned = passes.row_channels % vector == 0 && device::is_aligned(input, 16) &&
                       (output == nullptr ||
                        (passes.problem.channels % vector == 0 && device::is_aligned(output, 16)));
  return aligned ? vector : 1;
}

template <class T, class F>
void dispatch_last_vector(int vector, F&& body) {
  if (vector == 1) return body(std::integral_constant<int, 1>{});
  body(std::integral_constant<int, 16 / int(sizeof(T))>{});
}

template <class T>
void launch_moments(Passes const& passes, void const* tensor, StatisticsTargets const& targets,
                    Partial* partials, cudaStream_t stream) {
  GroupNormProblem const& p = passes.problem;
  auto const* input = static_cast<T const*>(tensor);
  bool const activate = p.activation_before != Activation::kIdentity;
  int64_t const groups = p.batch * p.groups;
  float const eps = float(p.eps);
  if (p.layout == Layout::kChannelsFirst) {
    Split const split = split_run(p.group_size(), sizeof(T), 16 / sizeof(T));
    dim3 const grid = device::checked_grid("moments_channels_first", groups * split.count);
    device::dispatch_bool(activate, [&](auto active) {
      moments_channels_first<T, active.value><<<grid, kThreads, 0, stream>>>(
          input, partials, p.group_size(), split.size, split.count, p.activation_before);
    });
    FUSEDCONV_CUDA("moments_channels_first", cudaGetLastError());
    dim3 const blocks =
        device::checked_grid("finalize_channels_first", ceil_div(groups * 32, kThreads));
    finalize_channels_first<<<blocks, kThreads, 0, stream>>>(
        partials, targets, groups, p.group_size(), split.size, split.count, eps);
    FUSEDCONV_CUDA("finalize_channels_first", cudaGetLastError());
    return;
  }
  Split const split = split_rows(passes);
  dispatch_last_vector<T>(last_vector(passes, input, nullptr), [&](auto vector) {
    RowMap const map = RowMap::of(passes.row_channels, vector.value);
    dim3 const grid =
        device::checked_grid("moments_channels_last", p.batch * split.count, map.slabs);
    int const shared =
        map.lanes * map.columns * vector.value * int(sizeof(device::RelativeMoments));
    device::dispatch_bool(activate, [&](auto active) {
      moments_channels_last<T, vector.value, active.value>
          <<<grid, kThreads, shared, stream>>>(input, partials, passes.row_channels, p.pixels,
                                               split.size, split.count, map, p.activation_before);
    });
  });
  FUSEDCONV_CUDA("moments_channels_last", cudaGetLastError());
  dim3 const blocks = device::checked_grid("finalize_channels_last", groups);
  finalize_channels_last<<<blocks, kThreads, 0, stream>>>(
      partials, targets, int(p.groups), int(p.channels_per_group()), passes.row_channels, p.pixels,
      split.size, split.count, eps);
  FUSEDCONV_CUDA("finalize_channels_last", cudaGetLastError());
}

template <class T, class U, bool kActivate>
void launch_normalize(Passes const& passes, GroupNormTensors const& tensors, Affine const& affine,
                      cudaStream_t stream) {
  GroupNormProblem const& p = passes.problem;
  auto const* input = static_cast<T const*>(tensors.input);
  auto* output = static_cast<U*>(tensors.output);
  if (p.layout == Layout::kChannelsFirst) {
    constexpr int kVector = 16 / sizeof(T);
    bool const vectors = p.pixels % kVector == 0 && device::is_aligned(input, 16) &&
                         device::is_aligned(output, kVector * int64_t(sizeof(U)));
    dispatch_last_vector<T>(vectors ? kVector : 1, [&](auto vector) {
      if (p.pixels >= 2048) {
        Split const split = split_run(p.pixels, sizeof(T), kVector);
        dim3 const grid =
            device::checked_grid("normalize_planes", p.batch * p.channels * split.count);
        normalize_planes<T, U, vector.value, kActivate><<<grid, kThreads, 0, stream>>>(
            input, output, affine, p.pixels, split.size, split.count);
      } else {
        int64_t const planes = p.batch * p.channels;
        FUSEDCONV_CHECK(planes <= 0x7fffffff, "normalize: batch x channels is ", planes);
        int64_t const blocks = ceil_div(planes * p.pixels, kThreads * vector.value);
        dim3 const grid =
            device::checked_grid("normalize_small_planes", std::min<int64_t>(blocks, 1 << 20));
        normalize_small_planes<T, U, vector.value, kActivate><<<grid, kThreads, 0, stream>>>(
            input, output, affine, unsigned(p.pixels), unsigned(planes));
      }
    });
    FUSEDCONV_CUDA("normalize_planes", cudaGetLastError());
    return;
  }
  if (passes.output_layout == Layout::kChannelsLast) {
    Split const split = split_rows(passes);
    dispatch_last_vector<T>(last_vector(passes, input, output), [&](auto vector) {
      RowMap const map = RowMap::of(passes.row_channels, vector.value);
      dim3 const grid = device::checked_grid("normalize_rows", p.batch * split.count, map.slabs);
      normalize_rows<T, U, vector.value, kActivate><<<grid, kThreads, 0, stream>>>(
          input, output, affine, passes.row_channels, p.pixels, split.size, split.count, map);
    });
    FUSEDCONV_CUDA("normalize_rows", cudaGetLastError());
    return;
  }
  using Tile = device::TransposeTile<U>;
  int64_t const pixel_tiles = ceil_div(p.pixels, Tile::kPixels);
  dim3 const grid = device::checked_grid("normalize_to_channels_first", p.batch * pixel_tiles,
                                         ceil_div(p.channels, Tile::kChannels));
  device::dispatch_vector<U>(output, p.pixels, [&](auto vector) {
    if constexpr (vector.value * sizeof(U) <= 16) {
      normalize_to_channels_first<T, U, vector.value, kActivate>
          <<<grid, device::kTileThreads, 0, stream>>>(input, output, affine, passes.row_channels,
                                                      p.pixels, unsigned(pixel_tiles));
    }
  });
  FUSEDCONV_CUDA("normalize_to_channels_first", cudaGetLastError());
}

void check(Passes const& passes) {
  GroupNormProblem const& p = passes.problem;
  FUSEDCONV_CHECK(p.groups > 0 && p.channels > 0 && p.channels % p.groups == 0, "num_groups is ",
                  p.groups, " for ", p.channels, " channels");
  FUSEDCONV_CHECK(p.channels <= 0x7fffffff, "channels is ", p.channels);
  FUSEDCONV_CHECK(passes.row_channels >= p.channels, "row_channels is ", passes.row_channels,
                  " for ", p.channels, " channels");
}

}  // namespace

int64_t moments_workspace_bytes(Passes const& passes, int64_t samples) {
  GroupNormProblem const& p = passes.problem;
  int64_t const bytes = size_of(p.dtype);
  int64_t const partials = p.layout == Layout::kChannelsFirst
                               ? p.groups * split_run(p.group_size(), bytes, 16 / bytes).count
                               : passes.row_channels * split_rows(passes).count;
  return samples * partials * int64_t(sizeof(Partial));
}

void moments(Passes const& passes, void const* input, StatisticsTargets const& targets,
             void* workspace, cudaStream_t stream) {
  check(passes);
  if (passes.problem.batch == 0) return;
  device::dispatch_type(passes.problem.dtype, [&](auto zero) {
    launch_moments<decltype(zero)>(passes, input, targets, static_cast<Partial*>(workspace),
                                   stream);
  });
}

void normalize(Passes const& passes, GroupNormTensors const& tensors, Statistics const* statistics,
               cudaStream_t stream) {
  check(passes);
  GroupNormProblem const& p = passes.problem;
  FUSEDCONV_CHECK(
      p.layout == Layout::kChannelsLast || passes.output_layout == Layout::kChannelsFirst,
      "normalize: channels-first input with channels-last output");
  if (p.batch == 0 || p.pixels == 0) return;
  Affine const affine = affine_of(p, tensors.weight, tensors.bias, statistics);
  bool const activate =
      p.activation_before != Activation::kIdentity || p.activation_after != Activation::kIdentity;
  device::dispatch_type(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    device::dispatch_bool(activate, [&](auto active) {
      if (passes.output_dtype == p.dtype) {
        return launch_normalize<T, T, active.value>(passes, tensors, affine, stream);
      }
      if constexpr (!std::is_same_v<T, float>) {
        if (passes.output_dtype == DType::kFloat32) {
          return launch_normalize<T, float, active.value>(passes, tensors, affine, stream);
        }
      }
      throw InvalidArgument(detail::join("normalize: output dtype ", name_of(passes.output_dtype),
                                         " from input dtype ", name_of(p.dtype)));
    });
  });
}

}  // namespace fusedconv::groupnorm
