// The epilogue of what has sub-pixel phases: bias and activation, stores side by side of phases
// that are neighbours along width, and moments where phases have taps of their own.
#pragma once

#include <cstdint>
#include <type_traits>

#include "conv/sm90/runs/moments.hpp"
#include "conv/sm90/runs/params.hpp"
#include "conv/sm90/runs/traits.hpp"
#include "cuda/math.hpp"
#include "fusedconv/activation.hpp"

namespace fusedconv::conv::sm90::runs {

inline constexpr int kPhaseSlots = kBlockN / 2 / 4;  // columns of a half that a lane has

// Where the phases of a lane's quad go. Its pixels are neighbours of a row; of each the phases
// along width are neighbours in the output.
struct OwnPhases {
  int64_t first;      // of the tensor's elements: the quad's first pixel in channel 0, all phases 0
  int64_t plane;      // elements of a channel
  int height, width;  // of the output
  int count;          // of pixels in the quad
  bool whole;         // the warp's quads, and lines begin where stores of 16 bytes may

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
    whole = __all_sync(~0u, count == kQuad) && width % 8 == 0;
  }

  // Of an output channel of the problem, from the first.
  __device__ __forceinline__ int64_t of(Params const& p, int channel) const {
    int tensor_channel, phase, phase_w, phase_h, phase_d;
    p.phases(tensor_channel, phase, channel);
    p.phases_w(phase, phase_w, phase);
    p.phases_h(phase_d, phase_h, phase);
    return of(tensor_channel, phase_d, phase_h) + phase_w;
  }
  // Of a channel of the tensor and a phase along depth and height, from the first.
  __device__ __forceinline__ int64_t of(int channel, int phase_d, int phase_h) const {
    return channel * plane + (int64_t(phase_d) * height + phase_h) * width;
  }
};

// Of phases that share all taps, which are channels of the block in turn. kWhole: OwnPhases::whole;
// else kPairs tells that phases along width are of an even number, so that a lane's two channels
// are neighbours.
template <class Traits, bool kWhole, bool kPairs, bool kActivated>
__device__ __forceinline__ void interleave_channels(
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

// Of phases that have taps of their own: a lane has all of a channel's along width, kHalf of them
// in either half of the columns. kActivated: what is stored; sums are of activated values.
template <class Traits, int kHalf, bool kActivated, class Sums>
__device__ __forceinline__ void interleave_halves(
    Params const& p, float const (&accumulators)[kRowTiles][kAccumulators],
    Block<true> const& block, OwnPhases const& own, float const* bias, Sums& sums) {
  using T = typename Traits::Element;
  using Form = typename Traits::Form;
  constexpr bool kSumsUp = !std::is_same_v<Sums, NoSums>;
  constexpr int kPhases = 2 * kHalf;
  constexpr int kValues = kQuad * kPhases;  // neighbours in the output
  constexpr int kVector = 16 / int(sizeof(T));
  int const lane_channel = threadIdx.x % 4;
  auto* const first = static_cast<T*>(p.output) + own.first;
#pragma unroll
  for (int c = 0; c < kPhaseSlots / kHalf; ++c) {
    int const channel = block.channel0 + 4 * c + lane_channel;
    // The first of the channel's columns, which all have its bias.
    float const added = bias[c * kHalf / 2 * 8 + 2 * lane_channel + c * kHalf % 2];
    float values[kValues];
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
#pragma unroll
      for (int r = 0; r < kPhases; ++r) {
        int const slot = c * kHalf + r % kHalf;
        int const a = r / kHalf * (kAccumulators / 2) + 4 * (slot / 2) + i / 2 * 2 + slot % 2;
        float const value = accumulators[i % 2][a] + added;
        values[i * kPhases + r] = kActivated ? device::quick_value<Form>(value) : value;
      }
    }
    device::Pack<T, kVector> stored[kValues / kVector];
#pragma unroll
    for (int v = 0; v < kValues / kVector; ++v) {
      float part[kVector];
#pragma unroll
      for (int k = 0; k < kVector; ++k) part[k] = values[v * kVector + k];
      stored[v] = device::Pack<T, kVector>::of(part);
    }
    if (channel < p.tensor_channels) {
      T* const target = first + own.of(channel, block.phase_d, block.phase_h);
      if (own.whole) {
#pragma unroll
        for (int v = 0; v < kValues / kVector; ++v) stored[v].store(target + v * kVector);
      } else {
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
          if (i < own.count * kPhases) target[i] = stored[i / kVector].values[i % kVector];
        }
      }
    }
    if constexpr (kSumsUp) {
#pragma unroll
      for (int v = 0; v < kValues / kVector; ++v) {
        float part[kVector];
        stored[v].to_floats(part);
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
          values[v * kVector + k] = kActivated ? part[k] : device::quick_value<Form>(part[k]);
        }
      }
      sums.add(c, values, own.count * kPhases);
    }
  }
}

// moments: the warpgroup's part of shared memory. barrier: of the warpgroup.
template <class Traits, int kHalf>
__device__ __forceinline__ void finish_halves(Params const& p,
                                              float const (&accumulators)[kRowTiles][kAccumulators],
                                              int index, Block<true> const& block,
                                              OwnPhases const& own, float const* bias,
                                              float* moments, int barrier) {
  auto const finish = [&](auto activated, auto sums_up) {
    constexpr int kChannels = kPhaseSlots / kHalf;
    std::conditional_t<sums_up.value, PhaseSums<kChannels>, NoSums> sums;
    interleave_halves<Traits, kHalf, activated.value>(p, accumulators, block, own, bias, sums);
    if constexpr (sums_up.value) {
      sums.store(own_moments(moments));
      int const row_phases = p.phases.divisor / p.phases_w.divisor;
      int const phase = block.phase_d * p.phases_h.divisor + block.phase_h;
      merge_tile(
          moments, own.count * 2 * kHalf, min(4 * kChannels, p.tensor_channels - block.channel0),
          barrier, [&](int channel, TilePartial const& partial) {
            int64_t const all = int64_t(index) * p.tensor_channels + block.channel0 + channel;
            p.partials[all * row_phases + phase] = partial;
          });
    }
  };
  if (p.partials == nullptr) {
    finish(std::true_type{}, std::false_type{});
  } else if (p.activates_output) {
    finish(std::true_type{}, std::true_type{});
  } else {
    finish(std::false_type{}, std::true_type{});
  }
}

template <class Traits>
__device__ __forceinline__ void interleave_tile(
    Params const& p, float const (&accumulators)[kRowTiles][kAccumulators], int index,
    Block<Traits::kOwnTaps> const& block, OwnPhases const& own, float const* bias, float* moments,
    int barrier) {
  if constexpr (Traits::kOwnTaps) {
    auto const finish = [&](auto half) {
      finish_halves<Traits, half.value>(p, accumulators, index, block, own, bias, moments, barrier);
    };
    switch (p.phase_blocks.half_phases) {
      case 1: return finish(std::integral_constant<int, 1>{});
      case 2: return finish(std::integral_constant<int, 2>{});
      default: return finish(std::integral_constant<int, 4>{});
    }
  } else {
    auto const store = [&](auto whole, auto pairs) {
      auto const finish = [&](auto activated) {
        interleave_channels<Traits, whole.value, pairs.value, activated.value>(
            p, accumulators, block.channel0, own, bias);
      };
      if (p.activates_output) {
        finish(std::true_type{});
      } else {
        finish(std::false_type{});
      }
    };
    if (__reduce_max_sync(~0u, own.whole && p.phases_w.divisor == 2)) {
      store(std::true_type{}, std::true_type{});
    } else if (p.phases_w.divisor % 2 == 0) {
      store(std::false_type{}, std::true_type{});
    } else {
      store(std::false_type{}, std::false_type{});
    }
  }
}

}  // namespace fusedconv::conv::sm90::runs
