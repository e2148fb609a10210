// Helpers of the kernels that transpose layouts: the shared tile, vector widths, run-time dispatch.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "fusedconv/check.hpp"
#include "fusedconv/types.hpp"

namespace fusedconv::device {

inline constexpr int kTileThreads = 256;

// A block's number from the end of the grid: of what a pass before wrote or read in ascending
// order, the last may still lie in the L2 cache.
__device__ __forceinline__ unsigned block_from_last() { return gridDim.x - 1 - blockIdx.x; }

// kChannels rows of kPixels elements, seen as 4-byte words of one or two neighbouring pixels. Runs
// of 512 bytes along pixels keep DRAM pages open; one word more than a row has lets accesses
// through columns touch each bank at most twice.
template <class T>
struct TransposeTile {
  static constexpr int kChannels = 64;
  static constexpr int kPixels = 512 / sizeof(T);
  static constexpr int kPerWord = 4 / sizeof(T);
  static constexpr int kRow = kPixels / kPerWord + 1;

  union Word {
    uint32_t bits;
    T pixels[kPerWord];
    __device__ __forceinline__ Word() : bits(0) {}
  };
  uint32_t words[kChannels * kRow];

  __device__ __forceinline__ void put(int channel, int word, Word value) {
    words[channel * kRow + word] = value.bits;
  }
  __device__ __forceinline__ Word get(int channel, int word) const {
    Word result;
    result.bits = words[channel * kRow + word];
    return result;
  }
  __device__ __forceinline__ T& element(int channel, int pixel) {
    return reinterpret_cast<T*>(words + channel * kRow)[pixel];
  }
};

// Where a block's tile is in [sample, pixel, channel], from the last on. Neighbours have other
// channels of the same pixels, so that DRAM pages stay open channels last.
template <class Tile>
struct TilePlace {
  int64_t sample, pixel, channel;  // the tile's first

  __device__ __forceinline__ TilePlace(unsigned pixel_tiles, unsigned channel_tiles) {
    unsigned const block = block_from_last();
    unsigned const pixels = block / channel_tiles;
    sample = pixels / pixel_tiles;
    pixel = int64_t(pixels % pixel_tiles) * Tile::kPixels;
    channel = int64_t(block % channel_tiles) * Tile::kChannels;
  }
};

template <class F>
auto dispatch_type(DType dtype, F&& body) {
  switch (dtype) {
    case DType::kFloat32: return body(float{});
    case DType::kFloat16: return body(__half{});
    case DType::kBFloat16: return body(__nv_bfloat16{});
  }
  throw InvalidArgument("dtype code " + std::to_string(int(dtype)) + " is unknown");
}

template <class F>
void dispatch_bool(bool value, F&& body) {
  value ? body(std::true_type{}) : body(std::false_type{});
}

inline bool is_aligned(void const* pointer, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % uintptr_t(bytes) == 0;
}

// Calls body with the widest vector (as an integral constant) that the pointer's alignment and the
// contiguous extent allow, 16 bytes at most.
template <class T, class F>
void dispatch_vector(void const* pointer, int64_t extent, F&& body) {
  auto const fits = [&](int count) {
    return extent % count == 0 && is_aligned(pointer, int64_t(count * sizeof(T)));
  };
  if constexpr (sizeof(T) == 2) {
    if (fits(8)) return body(std::integral_constant<int, 8>{});
  }
  if (fits(4)) return body(std::integral_constant<int, 4>{});
  if (fits(2)) return body(std::integral_constant<int, 2>{});
  body(std::integral_constant<int, 1>{});
}

inline dim3 checked_grid(char const* kernel, int64_t x, int64_t y = 1) {
  if (x < 1 || x > 0x7fffffff || y < 1 || y > 0xffff) {
    throw InvalidArgument(
        detail::join(kernel, ": grid of ", x, " x ", y, " blocks exceeds what a launch takes"));
  }
  return dim3(unsigned(x), unsigned(y));
}

}  // namespace fusedconv::device
