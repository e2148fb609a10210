// What becomes of a warpgroup's accumulators. A lane has of its quad of positions two channels of
// every eight. Of two channels at a time:
// 1. The bias is added and the activation applied. Accumulators that began as the bias would lose
//    what the tensor cores drop of sums that are small beside it.
// 2. The values, before or after it, are stored: lanes of a channel side by side, a quad each.
// 3. Those that are pixels enter sums about a shift that is one of the values.
// Then lanes exchange sums until each has those of two channels over the warp, and the four warps
// merge theirs through shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "conv/sm90/runs/params.hpp"
#include "conv/sm90/runs/traits.hpp"
#include "cuda/async.hpp"
#include "cuda/math.hpp"
#include "fusedconv/activation.hpp"
#include "groupnorm/moments.hpp"

namespace fusedconv::conv::sm90::runs {

// What is stored leaves the cache first: it is read again only when all else has passed through,
// and neighbouring tiles read the same lines of the input.
template <class T, int kWidth>
__device__ __forceinline__ void store_streaming(T* target, device::Pack<T, kWidth> const& pack) {
  using Words = device::Pack<T, kWidth>;
#pragma unroll
  for (int i = 0; i < Words::kWords; ++i) {
    __stcs(reinterpret_cast<typename Words::Word*>(target) + i, pack.words[i]);
  }
}

inline constexpr int kChannelPairs = kBlockN / 8;  // of a lane

// Where a lane's quad lies.
struct OwnQuad {
  int pixel;  // of the sample's
  int count;  // of pixels in it
  // Elements that each store of the warp may take, where all its quads are whole; else 0.
  int width;

  // own: of the tile's quads; row, column: where it lies in the strip.
  __device__ __forceinline__ OwnQuad(Params const& p, Tile const& tile, int own, int row,
                                     int column) {
    Raster const& raster = p.raster;
    int const output_column = tile.column0 + column * kQuad;
    bool const inside = own < raster.shapes[tile.shape].tile_quads && row < raster.p;
    count = inside ? max(0, min(kQuad, raster.q - output_column)) : 0;
    pixel = (tile.slice * raster.p + row) * raster.q + output_column;
    bool const whole = __all_sync(~0u, count == kQuad);
    auto const allows = [&](int elements) {
      return whole && p.pixels % elements == 0 && __all_sync(~0u, pixel % elements == 0);
    };
    width = allows(4) ? 4 : allows(2) ? 2 : 0;
  }
};

// Lanes that differ in one bit share the sums of 2 kHalf channels: each keeps kHalf of both.
template <int kHalf>
__device__ __forceinline__ void exchange(float (&sums)[2 * kChannelPairs], int bit) {
  bool const high = (threadIdx.x & bit) != 0;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    float const keep = high ? sums[i + kHalf] : sums[i];
    float const give = high ? sums[i] : sums[i + kHalf];
    sums[i] = keep + __shfl_xor_sync(~0u, give, bit);
  }
}
__device__ __forceinline__ void sum_over_quads(float (&sums)[2 * kChannelPairs]) {
  exchange<8>(sums, 16);
  exchange<4>(sums, 8);
  exchange<2>(sums, 4);
}

// A warp's sums over its pixels, by channel.
struct WarpMoments {
  float shift[kBlockN];
  float sum[kBlockN];
  float squares[kBlockN];
  float count;
};
static_assert(sizeof(WarpMoments) <= kMomentFloats * sizeof(float));

__device__ __forceinline__ WarpMoments& moments_of(float* base, int warp) {
  return *reinterpret_cast<WarpMoments*>(base + warp * kMomentFloats);
}

// Of a channel, about the shift of the first warp, which always has pixels.
__device__ __forceinline__ device::Moments merge_warps(float* base, int channel) {
  float const shift = moments_of(base, 0).shift[channel];
  float count = 0.0f, sum = 0.0f, squares = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kWarpgroupWarps; ++warp) {
    WarpMoments const& part = moments_of(base, warp);
    if (part.count == 0.0f) continue;
    float const difference = part.shift[channel] - shift;
    float const moved = part.count * difference;
    count += part.count;
    sum += part.sum[channel] + moved;
    squares +=
        part.squares[channel] + fmaf(2.0f * difference, part.sum[channel], moved * difference);
  }
  return device::shifted_moments(count, shift, sum, squares);
}

// What a lane has of a tile when its warp's values are through.
struct LaneSums {
  float sums[2 * kChannelPairs];
  float squares[2 * kChannelPairs];
  float shifts[2];  // of the pair of channels whose sums the lane has in the end
};

// The pair of channels of which a lane has the warp's sums in the end.
__device__ __forceinline__ int final_pair() {
  int const lane = threadIdx.x % 32;
  return (lane & 16) / 4 | (lane & 8) / 4 | (lane & 4) / 4;
}

// Activates, stores and sums up a lane's values. kWidth: of OwnQuad; 0 tells pixels and
// channels one by one. kActivated: what is stored. bias: of the block's channels.
template <class Traits, int kWidth, bool kActivated>
__device__ __forceinline__ void finish_values(Params const& p,
                                              float const (&accumulators)[kRowTiles][kAccumulators],
                                              Tile const& tile, int channel0, OwnQuad const& own,
                                              float const* bias, LaneSums& result) {
  using T = typename Traits::Element;
  using Form = typename Traits::Form;
  int const pair = threadIdx.x % 4 * 2;
  int64_t const stride = p.pixels;
  T* target = static_cast<T*>(p.output) +
              (int64_t(tile.sample) * p.out_channels + channel0 + pair) * stride + own.pixel;
  int const block_channels = min(kBlockN, p.out_channels - channel0);
  bool const sums_up = p.partials != nullptr;
#pragma unroll
  for (int j = 0; j < kChannelPairs; ++j) {
    float values[2][kQuad];
    float2 const added = *reinterpret_cast<float2 const*>(bias + 8 * j + pair);
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      values[0][i] = accumulators[i % 2][4 * j + i / 2 * 2] + added.x;
      values[1][i] = accumulators[i % 2][4 * j + i / 2 * 2 + 1] + added.y;
    }
    auto const store = [&] {
      T stored[2][kQuad];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int i = 0; i < kQuad; ++i) {
          stored[e][i] = device::from_float<T>(values[e][i]);
          values[e][i] = device::to_float(stored[e][i]);
        }
      }
      if constexpr (kWidth > 0) {
        if (8 * j >= block_channels) return;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
#pragma unroll
          for (int i = 0; i < kQuad; i += kWidth) {
            device::Pack<T, kWidth> pack;
#pragma unroll
            for (int k = 0; k < kWidth; ++k) {
              pack.values[k] = stored[e][i + k];
            }
            store_streaming(target + e * stride + i, pack);
          }
        }
      } else {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          bool const there = 8 * j + pair + e < block_channels;
#pragma unroll
          for (int i = 0; i < kQuad; ++i) {
            if (there && i < own.count) target[e * stride + i] = stored[e][i];
          }
        }
      }
    };
    if constexpr (!kActivated) store();
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (float& value : values[e]) {
        value = Traits::kSplits ? Form::value(value) : device::quick_value<Form>(value);
      }
    }
    if constexpr (kActivated) store();
    target += 8 * stride;
    if (!sums_up) continue;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float const shift = __shfl_sync(~0u, values[e][0], threadIdx.x % 4);
      if (final_pair() == j) result.shifts[e] = shift;
      float d[kQuad];
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        d[i] = values[e][i] - shift;
        if constexpr (kWidth == 0) d[i] = i < own.count ? d[i] : 0.0f;
      }
      result.sums[2 * j + e] = (d[0] + d[1]) + (d[2] + d[3]);
      result.squares[2 * j + e] = fmaf(d[0], d[0], d[1] * d[1]) + fmaf(d[2], d[2], d[3] * d[3]);
    }
  }
}

// Where the phases of a lane's quad go. Its pixels are neighbours of a row; of each the phases
// along width are neighbours in the output.
struct OwnPhases {
  int64_t first;      // of the tensor's elements: the quad's first pixel in channel 0, all phases 0
  int64_t plane;      // elements of a channel
  int height, width;  // of the output
  int count;          // of pixels in the quad
  bool whole;         // the warp's quads, and lines begin where a store of eight elements may

  __device__ __forceinline__ OwnPhases(Params const& p, Tile const& tile, int own, int row,
                                       int column) {
    Raster const& raster = p.raster;
    int const position = tile.column0 + column * kQuad;
    bool const inside = own < raster.shapes[tile.shape].tile_quads && row < raster.p;
    count = inside ? max(0, min(kQuad, raster.q - position)) : 0;
    height = raster.p * p.phases_h.divisor;
    width = raster.q * p.phases_w.divisor;
    int const depth_phases = p.phases.divisor / (p.phases_h.divisor * p.phases_w.divisor);
    plane = int64_t(p.pixels) * p.phases.divisor;
    int64_t const line = int64_t(tile.slice) * depth_phases * height + row * p.phases_h.divisor;
    first = tile.sample * int64_t(p.tensor_channels) * plane + line * width +
            position * p.phases_w.divisor;
    whole = __all_sync(~0u, count == kQuad) && p.phases_w.divisor == 2 && width % 8 == 0;
  }

  // Of an output channel of the problem, from the first.
  __device__ __forceinline__ int64_t of(Params const& p, int channel) const {
    int tensor_channel, phase, phase_w, phase_h, phase_d;
    p.phases(tensor_channel, phase, channel);
    p.phases_w(phase, phase_w, phase);
    p.phases_h(phase_d, phase_h, phase);
    return tensor_channel * plane + (int64_t(phase_d) * height + phase_h) * width + phase_w;
  }
};

// As finish_values() of what has phases, and no moments. kWhole: OwnPhases::whole; else kPairs
// tells that phases along width are of an even number, so that a lane's two channels are
// neighbours.
template <class Traits, bool kWhole, bool kPairs, bool kActivated>
__device__ __forceinline__ void interleave_values(
    Params const& p, float const (&accumulators)[kRowTiles][kAccumulators], int channel0,
    OwnPhases const& own, float const* bias) {
  using T = typename Traits::Element;
  using Form = typename Traits::Form;
  int const pair = threadIdx.x % 4 * 2;
  auto* const first = static_cast<T*>(p.output) + own.first;
#pragma unroll
  for (int j = 0; j < kChannelPairs; ++j) {
    int const channel = channel0 + 8 * j + pair;
    float values[2 * kQuad];  // of neighbouring pixels, two channels each
    float2 const added = *reinterpret_cast<float2 const*>(bias + 8 * j + pair);
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      values[2 * i] = accumulators[i % 2][4 * j + i / 2 * 2] + added.x;
      values[2 * i + 1] = accumulators[i % 2][4 * j + i / 2 * 2 + 1] + added.y;
    }
    if constexpr (kActivated) {
#pragma unroll
      for (float& value : values) {
        value = Traits::kSplits ? Form::value(value) : device::quick_value<Form>(value);
      }
    }
    if constexpr (kWhole || kPairs) {
      if (channel >= p.out_channels) continue;
      T* const target = first + own.of(p, channel);
      constexpr int kWidth = kWhole ? 16 / int(sizeof(T)) : 2;
#pragma unroll
      for (int i = 0; i < 2 * kQuad; i += kWidth) {
        if (!kWhole && i / 2 >= own.count) break;
        device::Pack<T, kWidth> pack;
#pragma unroll
        for (int k = 0; k < kWidth; ++k) pack.values[k] = device::from_float<T>(values[i + k]);
        pack.store(target + (kWhole ? i : i / 2 * p.phases_w.divisor));
      }
    } else {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (channel + e >= p.out_channels) break;
        T* const target = first + own.of(p, channel + e);
#pragma unroll
        for (int i = 0; i < kQuad; ++i) {
          if (i >= own.count) break;
          target[i * p.phases_w.divisor] = device::from_float<T>(values[2 * i + e]);
        }
      }
    }
  }
}

template <class Traits>
__device__ __forceinline__ void interleave_tile(
    Params const& p, float const (&accumulators)[kRowTiles][kAccumulators], int channel0,
    OwnPhases const& own, float const* bias) {
  auto const finish = [&](auto whole, auto pairs) {
    if (p.activates_output) {
      interleave_values<Traits, whole.value, pairs.value, true>(p, accumulators, channel0, own,
                                                                bias);
    } else {
      interleave_values<Traits, whole.value, pairs.value, false>(p, accumulators, channel0, own,
                                                                 bias);
    }
  };
  if (__reduce_max_sync(~0u, own.whole)) {
    finish(std::true_type{}, std::true_type{});
  } else if (p.phases_w.divisor % 2 == 0) {
    finish(std::false_type{}, std::true_type{});
  } else {
    finish(std::false_type{}, std::false_type{});
  }
}

// moments: the warpgroup's part of shared memory. barrier: of the warpgroup.
template <class Traits>
__device__ __forceinline__ void finish_tile(Params const& p,
                                            float const (&accumulators)[kRowTiles][kAccumulators],
                                            Tile const& tile, int index, int channel0,
                                            OwnQuad const& own, float const* bias, float* moments,
                                            int barrier) {
  LaneSums lane_sums{};
  auto const finish = [&](auto width, auto activated) {
    finish_values<Traits, width.value, activated.value>(p, accumulators, tile, channel0, own, bias,
                                                        lane_sums);
  };
  // Straight code for each way of storing: branches between the stores would cost more than they
  // decide.
  auto const finish_all = [&](auto activated) {
    bool const eights = (p.out_channels - channel0) % 8 == 0;
    int const width = __reduce_max_sync(~0u, eights ? own.width : 0);
    if (width == 4) {
      finish(std::integral_constant<int, 4>{}, activated);
    } else if (width == 2) {
      finish(std::integral_constant<int, 2>{}, activated);
    } else {
      finish(std::integral_constant<int, 0>{}, activated);
    }
  };
  if (p.activates_output) {
    finish_all(std::true_type{});
  } else {
    finish_all(std::false_type{});
  }
  if (p.partials == nullptr) return;
  sum_over_quads(lane_sums.sums);
  sum_over_quads(lane_sums.squares);
  int const warp = threadIdx.x % kWarpgroupThreads / 32;
  WarpMoments& mine = moments_of(moments, warp);
  int const final_channel = final_pair() * 8 + threadIdx.x % 4 * 2;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    mine.shift[final_channel + e] = lane_sums.shifts[e];
    mine.sum[final_channel + e] = lane_sums.sums[e];
    mine.squares[final_channel + e] = lane_sums.squares[e];
  }
  int const pixels = __reduce_add_sync(~0u, own.count) / 4;  // four lanes share a quad
  if (threadIdx.x % 32 == 0) mine.count = float(pixels);
  device::sync_threads(barrier, kWarpgroupThreads);
  int const channel = threadIdx.x % kWarpgroupThreads;
  if (channel < kBlockN && channel0 + channel < p.out_channels) {
    p.partials[int64_t(index) * p.out_channels + channel0 + channel] =
        merge_warps(moments, channel).partial();
  }
  device::sync_threads(barrier, kWarpgroupThreads);
}

}  // namespace fusedconv::conv::sm90::runs
