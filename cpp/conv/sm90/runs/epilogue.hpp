// What becomes of a warpgroup's accumulators. A lane has of its quad of positions two channels of
// every eight. Of two channels at a time:
// 1. The bias is added and the activation applied. Accumulators that began as the bias would lose
//    what the tensor cores drop of sums that are small beside it.
// 2. The values, before or after it, are stored: lanes of a channel side by side, a quad each. They
//    stay in the cache, where a pass behind finds the last of them.
// 3. Those that are pixels enter sums (moments.hpp).
#pragma once

#include <cstdint>
#include <type_traits>

#include "conv/sm90/runs/moments.hpp"
#include "conv/sm90/runs/params.hpp"
#include "conv/sm90/runs/traits.hpp"
#include "cuda/math.hpp"
#include "fusedconv/activation.hpp"

namespace fusedconv::conv::sm90::runs {

// A quad in halves, which must follow each other to reach the L2 cache as one access: what takes
// part of a sector counts there like all of it.
template <class T>
__device__ __forceinline__ void store_halves(T* target, device::Pack<T, kQuad> const& quad,
                                             QuadRange pixels) {
  int const first = pixels.has(0), second = pixels.has(kQuad / 2);
  if constexpr (sizeof(T) == 2) {
    asm volatile(
        "{\n"
        ".reg .pred first, second;\n"
        "setp.ne.s32 first, %3, 0;\n"
        "setp.ne.s32 second, %4, 0;\n"
        "@first st.global.b32 [%0], %1;\n"
        "@second st.global.b32 [%0 + 4], %2;\n"
        "}" ::"l"(target),
        "r"(quad.bits[0]), "r"(quad.bits[1]), "r"(first), "r"(second)
        : "memory");
  } else {
    asm volatile(
        "{\n"
        ".reg .pred first, second;\n"
        "setp.ne.s32 first, %5, 0;\n"
        "setp.ne.s32 second, %6, 0;\n"
        "@first st.global.v2.b32 [%0], {%1, %2};\n"
        "@second st.global.v2.b32 [%0 + 8], {%3, %4};\n"
        "}" ::"l"(target),
        "r"(quad.bits[0]), "r"(quad.bits[1]), "r"(quad.bits[2]), "r"(quad.bits[3]), "r"(first),
        "r"(second)
        : "memory");
  }
}

// Where a lane's quad lies.
struct OwnQuad {
  int pixel;  // of the sample's
  QuadRange pixels;
  // How the warp stores: 4, whole quads that are all pixels; 2, by halves, that are pixels or none;
  // 0, one by one.
  int width;

  // own: of the tile's quads; row, column: where it lies in the strip.
  __device__ __forceinline__ OwnQuad(Params const& p, Tile const& tile, int own, int row,
                                     int column) {
    Raster const& raster = p.raster;
    int const output_column = tile.column0 + column * kQuad - raster.stagger(tile.slice, row);
    bool const inside = own < raster.shapes[tile.shape].tile_quads && row < raster.p;
    pixels.begin = max(0, -output_column);
    pixels.end = inside ? min(kQuad, raster.q - output_column) : pixels.begin;
    pixel = (tile.slice * raster.p + row) * raster.q + output_column;
    auto const allows = [&](int elements) {
      bool const each = (pixel | pixels.begin | pixels.end) % elements == 0;
      return p.pixels % elements == 0 && __all_sync(~0u, each);
    };
    bool const whole = __all_sync(~0u, pixels.count() == kQuad);
    width = whole && allows(4) ? 4 : allows(2) ? 2 : 0;
  }
};

// A lane's values of a pair of channels, and as they are stored.
using Values = float[2][kQuad];
template <class T>
using Stored = device::Pack<T, kQuad>[2];

// Of the j-th pair, with the bias: that of the block's channels.
__device__ __forceinline__ void read_values(float const (&accumulators)[kRowTiles][kAccumulators],
                                            float const* bias, int j, Values& values) {
  float2 const added = *reinterpret_cast<float2 const*>(bias + 8 * j + threadIdx.x % 4 * 2);
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    values[0][i] = accumulators[i % 2][4 * j + i / 2 * 2] + added.x;
    values[1][i] = accumulators[i % 2][4 * j + i / 2 * 2 + 1] + added.y;
  }
}

template <class Traits>
__device__ __forceinline__ void activate_values(Values& values) {
  using Form = typename Traits::Form;
#pragma unroll
  for (auto& quad : values) {
#pragma unroll
    for (float& value : quad) {
      value = Traits::kSplits ? Form::value(value) : device::quick_value<Form>(value);
    }
  }
}

template <class T>
__device__ __forceinline__ void pack_values(Values const& values, Stored<T>& stored) {
#pragma unroll
  for (int e = 0; e < 2; ++e) stored[e] = device::Pack<T, kQuad>::of(values[e]);
}

// Activates a lane's values, stores them, before it or after, and adds the activated ones to sums.
// kWidth: of OwnQuad; 0 tells pixels and channels one by one. kActivated: what is stored.
template <class Traits, int kWidth, bool kActivated, class Sums>
__device__ __forceinline__ void finish_values(Params const& p,
                                              float const (&accumulators)[kRowTiles][kAccumulators],
                                              Tile const& tile, int channel0, OwnQuad const& own,
                                              float const* bias, Sums& sums) {
  using T = typename Traits::Element;
  constexpr bool kSumsUp = !std::is_same_v<Sums, NoSums>;
  int const pair = threadIdx.x % 4 * 2;
  int64_t const stride = p.pixels;
  T* target = static_cast<T*>(p.output) +
              (int64_t(tile.sample) * p.out_channels + channel0 + pair) * stride + own.pixel;
  int const block_channels = min(kBlockN, p.out_channels - channel0);
  auto const store = [&](int j, Stored<T> const& stored) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if constexpr (kWidth == kQuad) {
        if (8 * j < block_channels) stored[e].store(target + e * stride);
      } else if constexpr (kWidth > 0) {
        if (8 * j < block_channels) store_halves(target + e * stride, stored[e], own.pixels);
      } else {
        bool const there = 8 * j + pair + e < block_channels;
#pragma unroll
        for (int i = 0; i < kQuad; ++i) {
          if (there && own.pixels.has(i)) target[e * stride + i] = stored[e].values[i];
        }
      }
    }
    target += 8 * stride;
  };
  if constexpr (kActivated && Traits::kSplits) {
    // All values first: where they take long to compute, ptxas would else have too many under way.
    Stored<T> stored[kChannelPairs];
#pragma unroll
    for (int j = 0; j < kChannelPairs; ++j) {
      Values values;
      read_values(accumulators, bias, j, values);
      activate_values<Traits>(values);
      pack_values<T>(values, stored[j]);
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kChannelPairs; ++j) {
      store(j, stored[j]);
      if constexpr (kSumsUp) sums.add(j, stored[j], own.pixels);
      __syncwarp();
    }
  } else {
#pragma unroll
    for (int j = 0; j < kChannelPairs; ++j) {
      Values values;
      read_values(accumulators, bias, j, values);
      if constexpr (kActivated) activate_values<Traits>(values);
      Stored<T> stored;
      pack_values<T>(values, stored);
      store(j, stored);
      if constexpr (kSumsUp && kActivated) {
        sums.add(j, stored, own.pixels);
      } else if constexpr (kSumsUp) {
        to_floats(stored, values);
        activate_values<Traits>(values);
        sums.add(j, values, own.pixels);
      }
      __syncwarp();
    }
  }
}

// moments: the warpgroup's part of shared memory. barrier: of the warpgroup.
template <class Traits>
__device__ __forceinline__ void finish_tile(Params const& p,
                                            float const (&accumulators)[kRowTiles][kAccumulators],
                                            Tile const& tile, int index, int channel0,
                                            OwnQuad const& own, float const* bias, float* moments,
                                            int barrier) {
  auto const finish = [&](auto width, auto activated, auto sums_up) {
    constexpr int kWidth = width.value;
    std::conditional_t<sums_up.value, LaneSums<kWidth == kQuad>, NoSums> sums;
    finish_values<Traits, kWidth, activated.value>(p, accumulators, tile, channel0, own, bias,
                                                   sums);
    if constexpr (sums_up.value) sums.store(own_moments(moments));
  };
  // Straight code for each way of storing: branches between the stores would cost more than they
  // decide. Warps may have different ones, and meet behind them.
  auto const finish_all = [&](auto activated, auto sums_up) {
    bool const eights = (p.out_channels - channel0) % 8 == 0;
    int const width = __reduce_max_sync(~0u, eights ? own.width : 0);
    if (width == 4) {
      finish(std::integral_constant<int, 4>{}, activated, sums_up);
    } else if (width == 2) {
      finish(std::integral_constant<int, 2>{}, activated, sums_up);
    } else {
      finish(std::integral_constant<int, 0>{}, activated, sums_up);
    }
    if constexpr (sums_up.value) {
      merge_tile(moments, own.pixels.count(), min(kBlockN, p.out_channels - channel0), barrier,
                 [&](int channel, TilePartial const& partial) {
                   p.partials[int64_t(index) * p.out_channels + channel0 + channel] = partial;
                 });
    }
  };
  if (p.partials == nullptr) {
    finish_all(std::true_type{}, std::false_type{});
  } else if (p.activates_output) {
    finish_all(std::true_type{}, std::true_type{});
  } else {
    finish_all(std::false_type{}, std::true_type{});
  }
}

}  // namespace fusedconv::conv::sm90::runs
