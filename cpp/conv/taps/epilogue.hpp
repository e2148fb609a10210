// What becomes of a block's accumulators: bias, activation, moments of each channel, and by shared
// memory, where sub-pixel phases meet again, to the output in the caller's layout.
#pragma once

#include <cstdint>

#include "conv/taps/params.hpp"
#include "conv/taps/traits.hpp"
#include "cuda/math.hpp"
#include "fusedconv/activation.hpp"
#include "groupnorm/moments.hpp"

namespace fusedconv::conv::taps {

inline constexpr int kRowTiles = kGroupRows / 16;        // of the instruction
inline constexpr int kColumnTiles = kWarpPositions / 8;  // of the instruction

// A lane has of each instruction rows lane / 4 and 8 more, and two columns from lane % 4 * 2.
using Accumulators = float[kRowTiles][kColumnTiles][4];

// Calls body(value, row of the row group, position of the block).
template <class Traits, class Body>
__device__ __forceinline__ void for_each(Accumulators& sums, int warp, Body const& body) {
  int const lane = threadIdx.x % 32;
  int const first = warp / Traits::kGroups * kWarpPositions + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        body(sums[i][j][e], i * 16 + lane / 4 + e / 2 * 8, first + j * 8 + e % 2);
      }
    }
  }
}

// Whether a position of the tile is a pixel of a phase, and which: output positions by axis.
__device__ __forceinline__ bool pixel_of(Params const& p, Block const& block,
                                         int const (&residue)[kMaxAxes], int position,
                                         int (&pixel)[kMaxAxes]) {
  int d, h, w;
  p.tile_w(h, w, position);
  p.tile_h(d, h, h);
  if (d >= p.tile[0]) return false;
  pixel[0] = (block.origin[0] + d) * p.axes[0].problem.stride + residue[0];
  pixel[1] = (block.origin[1] + h) * p.axes[1].problem.stride + residue[1];
  pixel[2] = (block.origin[2] + w) * p.axes[2].problem.stride + residue[2];
  return pixel[0] < p.axes[0].problem.output && pixel[1] < p.axes[1].problem.output &&
         pixel[2] < p.axes[2].problem.output;
}

// Which of a lane's positions are pixels of its row group: bit 2 j + e for column e of tile j.
template <class Traits>
__device__ __forceinline__ uint32_t pixels_of(Params const& p, Block const& block,
                                              RowPlace const& own, int warp) {
  uint32_t result = 0;
  int const first = warp / Traits::kGroups * kWarpPositions + threadIdx.x % 4 * 2;
  int pixel[kMaxAxes];
#pragma unroll 1
  for (int i = 0; i < 2 * kColumnTiles; ++i) {
    bool const inside =
        own.present && pixel_of(p, block, own.residue, first + i / 2 * 8 + i % 2, pixel);
    result |= uint32_t(inside) << i;
  }
  return result;
}

__device__ __forceinline__ float sum_over_quad(float value) {
  value += __shfl_xor_sync(~0u, value, 1);
  return value + __shfl_xor_sync(~0u, value, 2);
}

// Moments of the block's channels: each warp's, then merged over the warps that have the same
// channels, in order, and left by tile and channel.
template <class Traits>
__device__ __forceinline__ void leave_moments(Params const& p, Block const& block,
                                              RowPlace const& own, int warp, Accumulators& sums,
                                              unsigned char* shared) {
  auto* const by_warp = reinterpret_cast<groupnorm::Partial*>(shared);
  int const lane = threadIdx.x % 32;
  uint32_t const pixels = pixels_of<Traits>(p, block, own, warp);
  float const count = sum_over_quad(float(__popc(pixels)));
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // About the mean in one float; what it is off by follows from the deviations' sum.
      float sum = 0.0f;
#pragma unroll
      for (int c = 0; c < 2 * kColumnTiles; ++c) {
        sum += pixels >> c & 1 ? sums[i][c / 2][2 * half + c % 2] : 0.0f;
      }
      float const mean = count > 0.0f ? sum_over_quad(sum) / count : 0.0f;
      float deviations = 0.0f, squares = 0.0f;
#pragma unroll
      for (int c = 0; c < 2 * kColumnTiles; ++c) {
        float const d = pixels >> c & 1 ? sums[i][c / 2][2 * half + c % 2] - mean : 0.0f;
        deviations += d;
        squares = fmaf(d, d, squares);
      }
      deviations = sum_over_quad(deviations);
      squares = sum_over_quad(squares);
      if (lane % 4 == 0) {
        device::Moments const moments =
            count > 0.0f ? device::shifted_moments(count, mean, deviations, squares)
                         : device::Moments{};
        by_warp[warp * kGroupRows + i * 16 + half * 8 + lane / 4] = moments.partial();
      }
    }
  }
  __syncthreads();
  // Row groups that differ in the phase along width alone are neighbours.
  int const sets = Traits::kGroups / p.width_phases;
  if (int(threadIdx.x) < sets * kGroupRows) {
    int const set = threadIdx.x / kGroupRows, row = threadIdx.x % kGroupRows;
    RowPlace const group(p, block.block_m * Traits::kGroups + set * p.width_phases);
    int const channel = group.channel + row;
    if (group.present && channel < p.output_channels) {
      device::Moments total;
      for (int phase = 0; phase < p.width_phases; ++phase) {
        for (int part = 0; part < Traits::kParts; ++part) {
          int const from = part * Traits::kGroups + set * p.width_phases + phase;
          groupnorm::Partial const& one = by_warp[from * kGroupRows + row];
          total.merge(device::Moments::of(one));
        }
      }
      // Slots of a tile: phases along depth and height, and along width where they are not merged.
      int const along_width = p.axes[2].phases / p.width_phases;
      int const phase = (group.residue[0] * p.axes[1].phases + group.residue[1]) * along_width +
                        (along_width > 1 ? group.residue[2] : 0);
      int const phases = p.axes[0].phases * p.axes[1].phases * along_width;
      int64_t const slot =
          block.sample * p.partial_slots + int64_t(block.tile_index) * phases + phase;
      p.partials[slot * p.output_channels * p.groups + block.group * p.output_channels + channel] =
          total.partial();
    }
  }
  __syncthreads();
}

// Puts values where stores find neighbours of the output side by side.
template <class Traits>
__device__ __forceinline__ void stage(Params const& p, RowPlace const& own, int warp,
                                      Accumulators& sums, typename Traits::Element* staged) {
  using T = typename Traits::Element;
  int const group = warp % Traits::kGroups;
  int const set = group / p.width_phases, phase = group % p.width_phases;
  if (p.channels_last) {
    constexpr int kPitch = staged_pixel_pitch(Traits::kElementBytes);
    T* const own_set = staged + set * Traits::kPositions * p.width_phases * kPitch;
    for_each<Traits>(sums, warp, [&](float& value, int row, int position) {
      own_set[(position * p.width_phases + phase) * kPitch + row] = device::from_float<T>(value);
    });
  } else {
    int const pitch = staged_channel_pitch(Traits::kGroups, p.width_phases, Traits::kElementBytes);
    T* const own_set = staged + set * kGroupRows * pitch + phase;
    for_each<Traits>(sums, warp, [&](float& value, int row, int position) {
      own_set[row * pitch + position * p.width_phases] = device::from_float<T>(value);
    });
  }
}

template <class T, int kVector>
__device__ __forceinline__ void copy_out(T* target, T const* source) {
  device::Pack<T, kVector>::load(source).store(target);
}

// Calls body with a compile-time number of elements that a store takes.
template <class T, class Body>
__device__ __forceinline__ void with_vector(int vector, Body const& body) {
  constexpr int kWidest = 16 / int(sizeof(T));
  if (vector == kWidest) {
    body(std::integral_constant<int, kWidest>{});
  } else if (vector == 2) {
    body(std::integral_constant<int, 2>{});
  } else {
    body(std::integral_constant<int, 1>{});
  }
}

template <class Traits>
__device__ __forceinline__ void store_planes(Params const& p, Block const& block,
                                             typename Traits::Element const* staged) {
  using T = typename Traits::Element;
  int const pitch = staged_channel_pitch(Traits::kGroups, p.width_phases, Traits::kElementBytes);
  int const sets = Traits::kGroups / p.width_phases;
  int const units = sets * kGroupRows * p.lines.divisor * p.line_vectors.divisor;
  AxisProblem const& width = p.axes[2].problem;
  int const step = p.width_phases > 1 || width.stride == 1 ? 1 : width.stride;
  int64_t const plane = int64_t(p.axes[0].problem.output) * p.axes[1].problem.output * width.output;
  T* const output = static_cast<T*>(p.output) +
                    (int64_t(block.sample) * p.groups + block.group) * p.output_channels * plane;
  with_vector<T>(p.output_vector, [&](auto vector) {
    constexpr int kVector = decltype(vector)::value;
#pragma unroll 1
    for (int unit = threadIdx.x; unit < units; unit += kThreads) {
      int rest, at, line, d, h;
      p.line_vectors(rest, at, unit);
      p.lines(rest, line, rest);
      RowPlace const group(p, block.block_m * Traits::kGroups + rest / kGroupRows * p.width_phases);
      int const channel = group.channel + rest % kGroupRows;
      p.tile_h(d, h, line);
      int const z = (block.origin[0] + d) * p.axes[0].problem.stride + group.residue[0];
      int const y = (block.origin[1] + h) * p.axes[1].problem.stride + group.residue[1];
      int const x = block.origin[2] * width.stride + at * kVector * step +
                    (p.width_phases > 1 ? 0 : group.residue[2]);
      if (!group.present || channel >= p.output_channels || z >= p.axes[0].problem.output ||
          y >= p.axes[1].problem.output || x >= width.output) {
        continue;
      }
      T const* const source =
          staged + rest * pitch + line * p.tile[2] * p.width_phases + at * kVector;
      copy_out<T, kVector>(
          output + channel * plane + (int64_t(z) * p.axes[1].problem.output + y) * width.output + x,
          source);
    }
  });
}

template <class Traits>
__device__ __forceinline__ void store_pixels(Params const& p, Block const& block,
                                             typename Traits::Element const* staged) {
  using T = typename Traits::Element;
  constexpr int kPitch = staged_pixel_pitch(Traits::kElementBytes);
  int const sets = Traits::kGroups / p.width_phases;
  int const pixels = Traits::kPositions * p.width_phases;
  int const vectors = p.pixel_vectors.divisor;
  int64_t const channels = int64_t(p.output_channels) * p.groups;
  T* const output = static_cast<T*>(p.output) + block.group * p.output_channels;
  with_vector<T>(p.output_vector, [&](auto vector) {
    constexpr int kVector = decltype(vector)::value;
#pragma unroll 1
    for (int unit = threadIdx.x; unit < sets * pixels * vectors; unit += kThreads) {
      int rest, at, position, phase;
      p.pixel_vectors(rest, at, unit);
      int const set = rest / pixels;
      p.width_phase(position, phase, rest % pixels);
      RowPlace group(p, block.block_m * Traits::kGroups + set * p.width_phases);
      group.residue[2] += phase;
      int const channel = group.channel + at * kVector;
      int pixel[kMaxAxes];
      if (!group.present || channel >= p.output_channels ||
          !pixel_of(p, block, group.residue, position, pixel)) {
        continue;
      }
      int64_t const line =
          (int64_t(block.sample) * p.axes[0].problem.output + pixel[0]) * p.axes[1].problem.output +
          pixel[1];
      copy_out<T, kVector>(
          output + (line * p.axes[2].problem.output + pixel[2]) * channels + channel,
          staged + rest * kPitch + at * kVector);
    }
  });
}

template <class Traits>
__device__ __forceinline__ void finish(Params const& p, Block const& block, RowPlace const& own,
                                       int warp, Accumulators& sums, unsigned char* shared) {
  using T = typename Traits::Element;
  int const lane = threadIdx.x % 32;
  if (p.bias != nullptr || p.scale != nullptr || p.shift != nullptr) {
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      int const channel = own.channel + i * 8 + lane / 4;
      int const index = block.group * p.output_channels + channel;
      bool const exists = channel < p.output_channels;
      float const bias = exists && p.bias != nullptr
                             ? device::to_float(static_cast<T const*>(p.bias)[index])
                             : 0.0f;
      float const scale = exists && p.scale != nullptr ? p.scale[index] : 1.0f;
      float const shift = exists && p.shift != nullptr ? p.shift[index] : 0.0f;
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& value = sums[i / 2][j][i % 2 * 2 + e];
          value = fmaf(value + bias, scale, shift);
        }
      }
    }
  }
  auto* const staged = reinterpret_cast<T*>(shared + kMomentBytes);
  auto const round = [&] {
    if (p.partials == nullptr) return;
    for_each<Traits>(sums, warp,
                     [](float& value, int, int) { value = device::as_stored<T>(value); });
  };
  if (!p.activates_output) {
    round();
    stage<Traits>(p, own, warp, sums, staged);
  }
  dispatch_activation(p.activation, [&](auto form) {
    using Form = decltype(form);
    for_each<Traits>(sums, warp, [&](float& value, int, int) {
      value = Traits::kSplits ? Form::value(value) : device::quick_value<Form>(value);
    });
  });
  if (p.activates_output) round();
  if (p.partials != nullptr) leave_moments<Traits>(p, block, own, warp, sums, shared);
  if (p.activates_output) stage<Traits>(p, own, warp, sums, staged);
  __syncthreads();
  if (p.channels_last) {
    store_pixels<Traits>(p, block, staged);
  } else {
    store_planes<Traits>(p, block, staged);
  }
}

}  // namespace fusedconv::conv::taps
