#include "cuda/launch.hpp"
#include "cuda/math.hpp"
#include "cuda/register_tile.hpp"
#include "cuda/tile.hpp"
#include "fusedconv/check.hpp"
#include "groupnorm/affine.hpp"
#include "groupnorm/launch.hpp"
#include "groupnorm/partition.hpp"
#include "groupnorm/passes.hpp"
#include "groupnorm/plane.hpp"

namespace fusedconv::groupnorm {
namespace {

using device::Pack;

// What a block has to do, in multiples of what memory likes best (kRunBytes of a plane, kLoads
// accesses of each thread to rows). Where the work before and behind the loads takes longer than
// memory, twice as much is less of it for each value.
template <class T, int kKnown>
constexpr int kShares = sizeof(T) == 2 || kKnown == kAnyActivation ? 2 : 1;
// Blocks of a multiprocessor that read rows, of which the registers are bounded: what keeps enough
// loads under way. With calls, 16-bit values take more.
template <class T, int kKnown>
constexpr int kBlocks = sizeof(T) == 2 && kKnown == kAnyActivation ? 2 : 4;
// Fewer blocks than these leave multiprocessors without work.
constexpr int64_t kFewestBlocks = 1024;

// ---- normalisation ----

// Block (split, plane): one channel of one sample is contiguous.
template <class T, class U, int kVector, int kKnown>
__global__ void __launch_bounds__(kThreads)
    normalize_planes(T const* __restrict__ input, U* __restrict__ output, Affine affine,
                     int64_t pixels, int64_t split_size, int splits) {
  unsigned const block = device::block_from_last();
  int const plane = int(block / unsigned(splits));
  int64_t const begin = int64_t(block % unsigned(splits)) * split_size;
  auto const channel = [&] {
    return ChannelAffine::of(affine, plane / affine.channels, plane % affine.channels);
  };
  normalize_run_of<T, U, kVector, kKnown>(input, output, channel, affine,
                                          int64_t(plane) * pixels + begin,
                                          min(split_size, pixels - begin));
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
    normalized_pack<U, kActivate>(Pack<T, kVector>::load(input + i), channel, affine)
        .store(output + i);
  }
}

__device__ __forceinline__ float4 entry_of(ChannelAffine const& channel) {
  return make_float4(channel.mean, channel.scale, channel.shift, 0.0f);
}
__device__ __forceinline__ ChannelAffine channel_of(float4 const& entry) {
  return {entry.x, entry.y, entry.z};
}

// What a block needs of its channels from `first` on, found once: finding it takes longer than
// normalising some values. [kVector][columns], to be read behind a barrier.
template <int kVector, int kUnroll>
__device__ __forceinline__ void fill_table(float4* table, int columns, Affine const& affine,
                                           int64_t sample, int first) {
  static_assert(device::kTileThreads == kThreads);
#pragma unroll kUnroll
  for (int c = int(threadIdx.x); c < columns * kVector; c += kThreads) {
    table[c % kVector * columns + c / kVector] =
        entry_of(ChannelAffine::of(affine, sample, first + c));
  }
}
template <int kVector>
__device__ __forceinline__ void read_table(ChannelAffine (&channels)[kVector], float4 const* table,
                                           int columns, int column) {
#pragma unroll
  for (int v = 0; v < kVector; ++v) channels[v] = channel_of(table[v * columns + column]);
}

// Channels last to channels last: a thread keeps its channels and goes down the rows.
template <class T, class U, int kVector, int kKnown>
__global__ void __launch_bounds__(kThreads, kBlocks<T, kKnown>)
    normalize_rows(T const* __restrict__ input, U* __restrict__ output, Affine affine,
                   int64_t row_channels, int64_t pixels, int64_t block_rows, unsigned row_blocks,
                   RowMap map) {
  extern __shared__ float4 table[];  // [kVector][map.columns]
  unsigned const block = device::block_from_last();
  int64_t const sample = block / row_blocks;
  int64_t const row_block = block % row_blocks;
  int const map_row = int(threadIdx.x) / map.columns;
  int const column = int(threadIdx.x) % map.columns;
  int const first = int(blockIdx.y) * map.columns * kVector;
  int const channel = first + column * kVector;
  bool const serves = map_row < map.rows && channel < affine.channels;

  int64_t const row = row_block * block_rows + map_row;
  int64_t const end = min(pixels, (row_block + 1) * block_rows);
  // Of the thread's, with pointers to the next.
  int left = serves && row < end ? (int(end - row) + map.rows - 1) / map.rows : 0;
  T const* source = input + (sample * pixels + row) * row_channels + channel;
  U* target = output + (sample * pixels + row) * affine.channels + channel;
  int64_t const source_step = map.rows * row_channels;
  int64_t const target_step = int64_t(map.rows) * affine.channels;
  Pack<T, kVector> loaded[kLoads];
  auto const load = [&] {
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      if (j < left) loaded[j] = Pack<T, kVector>::load(source);
      source += source_step;
    }
  };
  load();
  fill_table<kVector, 4>(table, map.columns, affine, sample, first);
  __syncthreads();
  ChannelAffine channels[kVector];
  read_table(channels, table, map.columns, column);
  while (left > 0) {
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      if (j < left) {
        normalized_pack<U, kKnown>(
            loaded[j], [&](int v) -> ChannelAffine const& { return channels[v]; }, affine)
            .store(target);
      }
      target += target_step;
    }
    left -= kLoads;
    load();
  }
}

// Channels last to channels first, where accesses to both are of 16 bytes. A thread's registers
// hold some channels of some pixels: it reads along the ones and writes along the others.
template <class T, class U, int kKnown>
__global__ void __launch_bounds__(device::kTileThreads, kBlocks<T, kKnown>)
    normalize_to_channels_first(T const* __restrict__ input, U* __restrict__ output, Affine affine,
                                int64_t row_channels, int64_t pixels, unsigned pixel_tiles,
                                unsigned channel_tiles) {
  using Tile = device::RegisterTile<T, U, true>;
  constexpr int kIn = Tile::kVectorChannels;
  constexpr int kOut = Tile::kVectorPixels;
  __shared__ float4 table[Tile::kChannels];
  device::TilePlace<Tile> const place(pixel_tiles, channel_tiles);
  Tile const own;
  int const channel = int(place.channel) + own.column * kIn;
  int64_t const pixel = place.pixel + own.pixel;
  bool const serves = channel < row_channels && pixel < pixels;
  Pack<T, kIn> loaded[kOut];
  if (serves) {
    T const* source = input + (place.sample * pixels + pixel) * row_channels + channel;
#pragma unroll
    for (int k = 0; k < kOut; ++k, source += row_channels) {
      loaded[k] = Pack<T, kIn>::load(source);
    }
  }
  fill_table<kIn, 1>(table, Tile::kColumns, affine, place.sample, int(place.channel));
  __syncthreads();
  U* const target = output + (place.sample * affine.channels + channel) * pixels + pixel;
#pragma unroll
  for (int v = 0; v < kIn; ++v) {
    if (channel + v >= affine.channels) continue;
    ChannelAffine const constants = channel_of(table[v * Tile::kColumns + own.column]);
    float values[kOut];
#pragma unroll
    for (int k = 0; k < kOut; ++k) values[k] = device::value_of(loaded[k], v);
    normalize_values<kKnown>(values, [&](int) { return constants; }, affine);
    if (serves) device::store_whole(target + v * pixels, Pack<U, kOut>::of(values));
  }
}

// The same where runs along pixels lie elsewhere or end within 16 bytes:
// 1. A block reads kPixels rows of kChannels channels, 16 bytes at a time.
// 2. It normalises in registers and transposes the tile in shared memory.
// 3. It writes runs along pixels, kVector at a time.
template <class T, class U, int kVector, int kKnown>
__global__ void __launch_bounds__(device::kTileThreads)
    ragged_normalize_to_channels_first(T const* __restrict__ input, U* __restrict__ output,
                                       Affine affine, int64_t row_channels, int64_t pixels,
                                       unsigned pixel_tiles, unsigned channel_tiles) {
  using Tile = device::TransposeTile<U>;
  using Word = typename Tile::Word;
  constexpr int kPerWord = Tile::kPerWord;
  __shared__ Tile tile;
  __shared__ float4 table[Tile::kChannels];
  device::TilePlace<Tile> const place(pixel_tiles, channel_tiles);
  int64_t const sample = place.sample, pixel0 = place.pixel;
  int const channel0 = int(place.channel);

  constexpr int kIn = 16 / sizeof(T);
  constexpr int kInLanes = Tile::kChannels / kIn;
  static_assert(device::kTileThreads % kInLanes == 0, "a thread keeps its channels");
  constexpr int kWordRows = device::kTileThreads / kInLanes;  // rows of words per step
  constexpr int kSteps = Tile::kPixels / kPerWord / kWordRows;
  constexpr int kAhead = kSteps < 8 / kPerWord ? kSteps : 8 / kPerWord;  // loads in flight
  static_assert(kSteps % kAhead == 0, "whole rounds of loads");
  int const channel = threadIdx.x % kInLanes * kIn;
  int const row0 = threadIdx.x / kInLanes;
  fill_table<kIn, 1>(table, kInLanes, affine, sample, channel0);
  __syncthreads();
  if (channel0 + channel < row_channels) {
    T const* const source = input + (sample * pixels + pixel0) * row_channels + channel0 + channel;
    ChannelAffine constants[kIn];
    read_table(constants, table, kInLanes, int(threadIdx.x) % kInLanes);
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
        Pack<U, kIn> results[kPerWord];
#pragma unroll
        for (int k = 0; k < kPerWord; ++k) {
          results[k] = normalized_pack<U, kKnown>(
              loaded[j][k], [&](int v) -> ChannelAffine const& { return constants[v]; }, affine);
        }
#pragma unroll
        for (int v = 0; v < kIn; ++v) {
          Word word;
#pragma unroll
          for (int k = 0; k < kPerWord; ++k) word.pixels[k] = results[k].values[v];
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

// ---- launches ----

// Calls body with what a kernel is to know of activations: more than whether there are any where
// accesses are of 16 bytes and the dtype stays.
template <class T, class U, int kVector, bool kActivate, int... kKnown, class F>
void dispatch_usual(GroupNormProblem const& p, F&& body) {
  if constexpr (std::is_same_v<T, U> && kVector * sizeof(T) == 16) {
    dispatch_known<kActivate, kKnown...>(p, body);
  } else {
    body(std::integral_constant<int, kActivate>{});
  }
}

template <class T, class U, bool kActivate>
void launch_planes(GroupNormProblem const& p, T const* input, U* output, Affine const& affine,
                   cudaStream_t stream) {
  constexpr int kVector = 16 / sizeof(T);
  int64_t const planes = p.batch * p.channels;
  bool const large = p.pixels >= 2048;
  bool const vectors = (large || p.pixels % kVector == 0) && device::is_aligned(input, 16) &&
                       device::is_aligned(output, kVector * int64_t(sizeof(U)));
  dispatch_last_vector<T>(vectors ? kVector : 1, [&](auto vector) {
    if (!large) {
      FUSEDCONV_CHECK(planes <= 0x7fffffff, "normalize: batch x channels: got ", planes);
      int64_t const blocks = ceil_div(planes * p.pixels, kThreads * vector.value);
      dim3 const grid =
          device::checked_grid("normalize_small_planes", std::min<int64_t>(blocks, 1 << 20));
      device::launch(normalize_small_planes<T, U, vector.value, kActivate>, grid, kThreads, 0,
                     stream, input, output, affine, unsigned(p.pixels), unsigned(planes));
      FUSEDCONV_CUDA("normalize_small_planes", cudaGetLastError());
      return;
    }
    dispatch_usual<T, U, vector.value, kActivate, kQuickGeluBefore, kQuickGeluAfter,
                   kQuickSiluBefore, kQuickSiluAfter>(p, [&](auto known) {
      int64_t const bytes = kShares<T, known.value> * kRunBytes;
      Split const split = split_run(p.pixels, sizeof(T), kVector, bytes);
      dim3 const grid = device::checked_grid("normalize_planes", planes * split.count);
      device::launch(normalize_planes<T, U, vector.value, known.value>, grid, kThreads, 0, stream,
                     input, output, affine, p.pixels, split.size, split.count);
    });
  });
  FUSEDCONV_CUDA("normalize_planes", cudaGetLastError());
}

template <class T, class U, bool kActivate>
void launch_rows(GroupNormProblem const& p, T const* input, U* output, Affine const& affine,
                 cudaStream_t stream) {
  dispatch_last_vector<T>(last_vector(p, input, output), [&](auto vector) {
    RowMap const map = RowMap::of(p.input_row_channels(), vector.value);
    int const shared_bytes = map.columns * vector.value * int(sizeof(float4));
    int64_t const least_rows = int64_t(map.rows) * kLoads;
    dispatch_usual<T, U, vector.value, kActivate, kQuickGeluBefore, kQuickGeluAfter,
                   kQuickSiluAfter, kReluBefore>(p, [&](auto known) {
      int64_t const most_rows = least_rows * kShares<T, known.value>;
      bool const many = p.batch * map.slabs * ceil_div(p.pixels, most_rows) >= kFewestBlocks;
      int64_t const block_rows = many ? most_rows : least_rows;
      int64_t const row_blocks = ceil_div(p.pixels, block_rows);
      dim3 const grid = device::checked_grid("normalize_rows", p.batch * row_blocks, map.slabs);
      device::launch(normalize_rows<T, U, vector.value, known.value>, grid, kThreads, shared_bytes,
                     stream, input, output, affine, p.input_row_channels(), p.pixels, block_rows,
                     unsigned(row_blocks), map);
    });
  });
  FUSEDCONV_CUDA("normalize_rows", cudaGetLastError());
}

template <class T, class U, bool kActivate>
void launch_tiles(GroupNormProblem const& p, T const* input, U* output, Affine const& affine,
                  cudaStream_t stream) {
  auto const launch = [&](auto kernel, auto tile) {
    using Tile = typename decltype(tile)::type;
    int64_t const pixel_tiles = ceil_div(p.pixels, Tile::kPixels);
    int64_t const channel_tiles = ceil_div(p.channels, Tile::kChannels);
    dim3 const grid =
        device::checked_grid("normalize_to_channels_first", p.batch * pixel_tiles * channel_tiles);
    device::launch(kernel, grid, device::kTileThreads, 0, stream, input, output, affine,
                   p.input_row_channels(), p.pixels, unsigned(pixel_tiles),
                   unsigned(channel_tiles));
  };
  device::dispatch_vector<U>(output, p.pixels, [&](auto vector) {
    if constexpr (vector.value * sizeof(U) == 16) {
      dispatch_usual<T, U, 16 / sizeof(T), kActivate, kQuickGeluAfter, kQuickSiluAfter>(
          p, [&](auto known) {
            launch(&normalize_to_channels_first<T, U, known.value>,
                   std::type_identity<device::RegisterTile<T, U, true>>{});
          });
    } else {
      launch(&ragged_normalize_to_channels_first<T, U, vector.value, kActivate>,
             std::type_identity<device::TransposeTile<U>>{});
    }
  });
  FUSEDCONV_CUDA("normalize_to_channels_first", cudaGetLastError());
}

template <class T, class U, bool kActivate>
void launch_normalize(GroupNormProblem const& p, GroupNormTensors const& tensors,
                      Affine const& affine, cudaStream_t stream) {
  auto const* input = static_cast<T const*>(tensors.input);
  auto* output = static_cast<U*>(tensors.output);
  if (p.input_layout == Layout::kChannelsFirst) {
    launch_planes<T, U, kActivate>(p, input, output, affine, stream);
  } else if (p.output_layout == Layout::kChannelsLast) {
    launch_rows<T, U, kActivate>(p, input, output, affine, stream);
  } else {
    launch_tiles<T, U, kActivate>(p, input, output, affine, stream);
  }
}

}  // namespace

void normalize(GroupNormProblem const& p, GroupNormTensors const& tensors,
               Statistics const* statistics, cudaStream_t stream) {
  check(p);
  FUSEDCONV_CHECK(
      p.input_layout == Layout::kChannelsLast || p.output_layout == Layout::kChannelsFirst,
      "normalize: channels-first input with channels-last output");
  if (p.batch == 0 || p.pixels == 0) return;
  Affine const affine = affine_of(p, tensors.weight, tensors.bias, statistics);
  dispatch_kernel(p, [&](auto zero, auto active) {
    using T = decltype(zero);
    if (p.output_dtype == p.dtype) {
      return launch_normalize<T, T, active.value>(p, tensors, affine, stream);
    }
    if constexpr (!std::is_same_v<T, float>) {
      if (p.output_dtype == DType::kFloat32) {
        return launch_normalize<T, float, active.value>(p, tensors, affine, stream);
      }
    }
    throw InvalidArgument(detail::join("normalize: output dtype ", name_of(p.output_dtype),
                                       " from input dtype ", name_of(p.dtype)));
  });
}

}  // namespace fusedconv::groupnorm
