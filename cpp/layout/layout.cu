#include "layout/layout.hpp"

#include "cuda/launch.hpp"
#include "cuda/math.hpp"
#include "cuda/register_tile.hpp"
#include "cuda/tile.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::layout {
namespace {

using device::Pack;

template <class T, bool kRound>
__device__ __forceinline__ T rounded(T value) {
  if constexpr (kRound) {
    return device::round_to_tf32(value);
  } else {
    return value;
  }
}

// The i-th values of kVector packs.
template <bool kRound, class T, int kVector>
__device__ __forceinline__ Pack<T, kVector> values_of(Pack<T, kVector> const (&packs)[kVector],
                                                      int i) {
  Pack<T, kVector> result;
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int c = 0; c < kVector; c += 2) {
      result.bits[c / 2] =
          __byte_perm(packs[c].bits[i / 2], packs[c + 1].bits[i / 2], i % 2 == 0 ? 0x5410 : 0x7632);
    }
  } else {
#pragma unroll
    for (int c = 0; c < kVector; ++c) result.values[c] = rounded<T, kRound>(packs[c].values[i]);
  }
  return result;
}

// Where runs along pixels are read 16 bytes at a time: a thread transposes what it reads in its
// registers.
template <class T, bool kRound>
__global__ void __launch_bounds__(device::kTileThreads, 4)
    channels_first_to_last(T const* __restrict__ input, T* __restrict__ output, int64_t channels,
                           int64_t padded_channels, int64_t pixels, unsigned pixel_tiles,
                           unsigned channel_tiles) {
  using Tile = device::RegisterTile<T, T, false>;
  constexpr int kVector = Tile::kVectorPixels;
  device::TilePlace<Tile> const place(pixel_tiles, channel_tiles);
  Tile const own;
  int64_t const channel = place.channel + own.column * kVector;
  int64_t const pixel = place.pixel + own.pixel;
  if (channel >= padded_channels || pixel >= pixels) return;
  T const* source = input + (place.sample * channels + channel) * pixels + pixel;
  Pack<T, kVector> packs[kVector];
  // Without conditions where there are none, as a load under one takes a move for each register.
  if (channel + kVector <= channels) {
#pragma unroll
    for (int c = 0; c < kVector; ++c, source += pixels) packs[c] = Pack<T, kVector>::load(source);
  } else {
#pragma unroll
    for (int c = 0; c < kVector; ++c, source += pixels) {
      if (channel + c < channels) packs[c] = Pack<T, kVector>::load(source);
    }
  }
  T* target = output + (place.sample * pixels + pixel) * padded_channels + channel;
#pragma unroll
  for (int k = 0; k < kVector; ++k, target += padded_channels) {
    device::store_whole(target, values_of<kRound>(packs, k));
  }
}

// The same of runs that lie elsewhere or end within 16 bytes:
// 1. A block reads kChannels runs of kPixels pixels, kVector at a time.
// 2. The tile is transposed in shared memory.
// 3. The block writes rows of channels, 16 bytes at a time.
template <class T, int kVector, bool kRound>
__global__ void __launch_bounds__(device::kTileThreads)
    ragged_channels_first_to_last(T const* __restrict__ input, T* __restrict__ output,
                                  int64_t channels, int64_t padded_channels, int64_t pixels,
                                  unsigned pixel_tiles, unsigned channel_tiles) {
  using Tile = device::TransposeTile<T>;
  using Word = typename Tile::Word;
  constexpr int kPerWord = Tile::kPerWord;
  __shared__ Tile tile;
  device::TilePlace<Tile> const place(pixel_tiles, channel_tiles);
  int64_t const sample = place.sample, pixel0 = place.pixel, channel0 = place.channel;
  T const* const source = input + (sample * channels + channel0) * pixels + pixel0;

  constexpr int kLanes = Tile::kPixels / kVector;
  constexpr int kSteps = Tile::kChannels * kLanes / device::kTileThreads;
  constexpr int kAhead = 8;  // loads in flight per thread
  static_assert(kSteps % kAhead == 0, "whole rounds of loads");
#pragma unroll 1
  for (int step = 0; step < kSteps; step += kAhead) {
    Pack<T, kVector> packs[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      int const index = threadIdx.x + (step + j) * device::kTileThreads;
      int const channel = index / kLanes;
      int const pixel = index % kLanes * kVector;
      // Vectors do not straddle the border: kVector > 1 only where pixels is a multiple of it.
      if (channel0 + channel < channels && pixel0 + pixel < pixels) {
        packs[j] = Pack<T, kVector>::load(source + channel * pixels + pixel);
      }
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      int const index = threadIdx.x + (step + j) * device::kTileThreads;
      int const channel = index / kLanes;
      int const pixel = index % kLanes * kVector;
      if constexpr (kVector < kPerWord) {
        tile.element(channel, pixel) = rounded<T, kRound>(packs[j].values[0]);
      } else {
#pragma unroll
        for (int i = 0; i < kVector; i += kPerWord) {
          Word word;
#pragma unroll
          for (int k = 0; k < kPerWord; ++k) {
            word.pixels[k] = rounded<T, kRound>(packs[j].values[i + k]);
          }
          tile.put(channel, (pixel + i) / kPerWord, word);
        }
      }
    }
  }
  __syncthreads();

  constexpr int kOut = 16 / sizeof(T);
  constexpr int kOutLanes = Tile::kChannels / kOut;
  constexpr int kWordRows = Tile::kPixels / kPerWord;
  T* const target = output + (sample * pixels + pixel0) * padded_channels + channel0;
#pragma unroll 4
  for (int index = threadIdx.x; index < kWordRows * kOutLanes; index += device::kTileThreads) {
    int const word_row = index / kOutLanes;
    int const channel = index % kOutLanes * kOut;
    if (channel0 + channel >= padded_channels) continue;
    Pack<T, kOut> packs[kPerWord];
#pragma unroll
    for (int i = 0; i < kOut; ++i) {
      Word const word = tile.get(channel + i, word_row);
#pragma unroll
      for (int k = 0; k < kPerWord; ++k) packs[k].values[i] = word.pixels[k];
    }
#pragma unroll
    for (int k = 0; k < kPerWord; ++k) {
      int const pixel = word_row * kPerWord + k;
      if (pixel0 + pixel < pixels) packs[k].store(target + pixel * padded_channels + channel);
    }
  }
}

// One thread for 16 bytes of a padded pixel, of which there are `total`.
template <class T, bool kRound>
__global__ void pad_channels(T const* __restrict__ input, T* __restrict__ output, int64_t channels,
                             int64_t padded_channels, int64_t total) {
  constexpr int kOut = 16 / sizeof(T);
  int64_t const stride = int64_t(gridDim.x) * blockDim.x;
  int64_t const pixel_packs = padded_channels / kOut;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < total; i += stride) {
    int64_t const row = i / pixel_packs;
    int64_t const channel = (i - row * pixel_packs) * kOut;
    T const* const source = input + row * channels + channel;
    Pack<T, kOut> pack;  // zeros
#pragma unroll
    for (int c = 0; c < kOut; ++c) {
      if (channel + c < channels) pack.values[c] = rounded<T, kRound>(source[c]);
    }
    pack.store(output + i * kOut);
  }
}

template <class T, bool kRound>
__global__ void pack_filter_kernel(PackedFilterProblem problem, T const* __restrict__ weight,
                                   T const* __restrict__ bias, T* __restrict__ filter,
                                   T* __restrict__ packed_bias) {
  conv::FilterSource const& source = problem.source;
  int64_t const taps = source.t * source.r * source.s;
  int64_t const total = problem.padded_k * taps * problem.padded_c;
  int64_t const stride = int64_t(gridDim.x) * blockDim.x;
  int64_t const first = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  for (int64_t i = first; i < total; i += stride) {
    int64_t const c = i % problem.padded_c;
    int64_t const tap = i / problem.padded_c % taps;
    int64_t const k = i / (problem.padded_c * taps);
    T value = T(0.0f);
    if (c < source.c && k < source.k) {
      int64_t const s = source.s - 1 - tap % source.s;
      int64_t const r = source.r - 1 - tap / source.s % source.r;
      int64_t const t = source.t - 1 - tap / (source.s * source.r);
      value = rounded<T, kRound>(
          weight[c * source.stride_c + k * source.stride_k + t * source.stride_t +
                 r * source.stride_r + s * source.stride_s]);
    }
    filter[i] = value;
  }
  if (bias != nullptr) {
    for (int64_t k = first; k < problem.padded_k; k += stride) {
      packed_bias[k] = k < source.k ? bias[k] : T(0.0f);
    }
  }
}

template <class T, bool kRound>
void launch_to_channels_last(ChannelsLastProblem const& p, void const* input, void* output,
                             cudaStream_t stream) {
  auto const* source = static_cast<T const*>(input);
  auto* target = static_cast<T*>(output);
  if (p.source == Layout::kChannelsLast) {
    int64_t const total = p.batch * p.pixels * p.padded_channels / (16 / int(sizeof(T)));
    int const blocks = int(std::min<int64_t>(ceil_div(total, 256), 1 << 16));
    device::launch(pad_channels<T, kRound>, blocks, 256, 0, stream, source, target, p.channels,
                   p.padded_channels, total);
    FUSEDCONV_CUDA("pad_channels", cudaGetLastError());
    return;
  }
  auto const launch = [&](auto kernel, auto tile) {
    using Tile = typename decltype(tile)::type;
    int64_t const pixel_tiles = ceil_div(p.pixels, Tile::kPixels);
    int64_t const channel_tiles = ceil_div(p.padded_channels, Tile::kChannels);
    dim3 const grid =
        device::checked_grid("channels_first_to_last", p.batch * pixel_tiles * channel_tiles);
    device::launch(kernel, grid, device::kTileThreads, 0, stream, source, target, p.channels,
                   p.padded_channels, p.pixels, unsigned(pixel_tiles), unsigned(channel_tiles));
  };
  device::dispatch_vector<T>(source, p.pixels, [&](auto vector) {
    if constexpr (vector.value * sizeof(T) == 16) {
      launch(&channels_first_to_last<T, kRound>,
             std::type_identity<device::RegisterTile<T, T, false>>{});
    } else {
      launch(&ragged_channels_first_to_last<T, vector.value, kRound>,
             std::type_identity<device::TransposeTile<T>>{});
    }
  });
  FUSEDCONV_CUDA("channels_first_to_last", cudaGetLastError());
}

template <class T, bool kRound>
void launch_pack_filter(PackedFilterProblem const& p, void const* weight, void const* bias,
                        void* filter, void* packed_bias, cudaStream_t stream) {
  int64_t const total = p.padded_k * p.source.t * p.source.r * p.source.s * p.padded_c;
  int const blocks = int(std::min<int64_t>(ceil_div(total, 256), 4096));
  device::launch(pack_filter_kernel<T, kRound>, blocks, 256, 0, stream, p,
                 static_cast<T const*>(weight), static_cast<T const*>(bias),
                 static_cast<T*>(filter), static_cast<T*>(packed_bias));
  FUSEDCONV_CUDA("pack_filter", cudaGetLastError());
}

}  // namespace

void to_channels_last(ChannelsLastProblem const& p, void const* input, void* output,
                      cudaStream_t stream) {
  FUSEDCONV_CHECK(p.padded_channels * size_of(p.dtype) % 16 == 0, "padded_channels: got ",
                  p.padded_channels, " of ", name_of(p.dtype));
  if (p.batch == 0 || p.pixels == 0) return;
  device::dispatch_type(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (std::is_same_v<T, float>) {
      if (p.round_tf32) return launch_to_channels_last<T, true>(p, input, output, stream);
    }
    launch_to_channels_last<T, false>(p, input, output, stream);
  });
}

void pack_filter(PackedFilterProblem const& p, void const* weight, void const* bias, void* filter,
                 void* packed_bias, cudaStream_t stream) {
  device::dispatch_type(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (std::is_same_v<T, float>) {
      if (p.round_tf32) {
        return launch_pack_filter<T, true>(p, weight, bias, filter, packed_bias, stream);
      }
    }
    launch_pack_filter<T, false>(p, weight, bias, filter, packed_bias, stream);
  });
}

}  // namespace fusedconv::layout
