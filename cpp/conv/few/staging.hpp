// What a block computes, and its weights and inputs in shared memory.
#pragma once

#include <cstdint>

#include "conv/few/params.hpp"
#include "conv/few/products.hpp"
#include "conv/few/sums.hpp"
#include "cuda/math.hpp"

namespace fusedconv::conv::few {

// A block's part of the problem.
struct Tile {
  int sample, channel, slot;  // the first output channel; the slot of partial moments
  int first_plane, end_plane, first_line, end_line;  // outputs

  __device__ __forceinline__ explicit Tile(Params const& p) {
    int rest, h, d, block;
    p.tiles_h(rest, h, int(blockIdx.x));
    p.depth_tiles(rest, d, rest);
    p.channel_blocks(sample, block, rest);
    slot = d * p.tiles_h.divisor + h;
    channel = block * kBlockChannels;
    first_plane = d * p.planes;
    end_plane = min(first_plane + p.planes, p.output_extent[0]);
    first_line = h * p.lines * kStride;
    end_line = min(first_line + p.lines * kStride, p.output_extent[1]);
  }
};

// The taps of even and of odd outputs along an axis: `even` ones have one, of the first input that
// a quotient meets; odd ones have the last tap of that and the first tap of the second.
__device__ __forceinline__ constexpr int taps_of(bool odd) { return odd ? 2 : 1; }
__device__ __forceinline__ constexpr int tap_of(bool odd, int input) {
  return odd ? (input == 0 ? 2 : 0) : 1;
}

// Where products of a line of outputs begin in the list of weights' operands, by the parity of its
// plane and of the line in that. Those of an odd plane's line are in pairs, of its two planes of
// the input.
__device__ __forceinline__ constexpr int first_product(bool odd_plane, bool odd_line) {
  return odd_plane ? (odd_line ? 5 : 3) : (odd_line ? 1 : 0);
}

// The weights' operands to shared memory, as large as Known has sums: [quad, lane, register].
template <Math kMath, bool kDeep, class Known>
__device__ __forceinline__ void stage_weights(Params const& p, Tile const& tile,
                                              uint32_t* operands) {
  using P = Products<kMath>;
  using T = typename P::Element;
  T const* const weight = static_cast<T const*>(p.weight);
  constexpr int kRegisters = kOperands * kWarp * 2 / P::kValues;
  for (int i = int(threadIdx.x); i < kRegisters; i += kThreads) {
    int const word = i % 4, lane = i / 4 % kWarp;
    Place const place = P::place(i / (4 * kWarp), word);
    bool const odd_plane = place.product >= first_product(true, false);
    bool const odd_line = place.product >= first_product(odd_plane, true);
    int const number = place.product - first_product(odd_plane, odd_line);
    int const z = odd_plane ? number % 2 : 0, y = odd_plane ? number / 2 : number;
    int const k = tile.channel + channel_of(place.half, lane);
    device::Pack<T, P::kValues> pack;
#pragma unroll
    for (int v = 0; v < P::kValues; ++v) {
      int neighbour, channel;
      P::meets(lane, word, v, neighbour, channel);
      T value = T(0.0f);
      bool const met = place.parity == 1 || neighbour == 0;
      if (met && channel < p.channels && k < p.output_channels && (kDeep || !odd_plane)) {
        int const t = kDeep ? tap_of(odd_plane, z) : 0;
        value = weight[channel * p.stride_c + k * p.stride_k + t * p.stride_t +
                       tap_of(odd_line, y) * p.stride_r +
                       tap_of(place.parity == 1, neighbour) * p.stride_s];
      }
      pack.values[v] = P::staged(T(Known::kScale * device::to_float(value)));
    }
    operands[i] = pack.bits[0];
  }
}

// Planes of the input under the tile, zeros outside: [slot, line, column, channel]. Which pixels
// are a thread's is the same for all of them.
template <Math kMath>
class PlaneStaging {
  using P = Products<kMath>;
  using T = typename P::Element;
  static constexpr int kAtOnce = 2;  // pixels of a thread
  static constexpr int kOutside = -1;

 public:
  __device__ __forceinline__ PlaneStaging(Params const& p, Tile const& tile, T* box)
      : p_(p),
        tile_(tile),
        box_(box),
        sample_(static_cast<T const*>(p.input) +
                int64_t(tile.sample) * p.channels * p.input_pixels) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) offsets_[i] = offset_of(int(threadIdx.x) + i * kThreads);
  }

  // What a thread has of a plane.
  struct Held {
    T values[kAtOnce][kMostInputs] = {};
  };

  // Plane `plane`, which may be outside, is under way behind load(), and in shared memory behind
  // store() and a barrier.
  __device__ __forceinline__ Held load(int plane) const {
    int const pixels = p_.box_lines * p_.box_columns;
    T const* const source = plane_of(plane);
    Held held;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      // Few warps have more than one.
      if (int(threadIdx.x) + i * kThreads < pixels) load(held.values[i], source, offsets_[i]);
    }
    return held;
  }
  __device__ __forceinline__ void store(Held const& held, int plane, int slot) const {
    int const pixels = p_.box_lines * p_.box_columns;
    T* const target = box_ + slot * pixels * kMostInputs;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      int const pixel = int(threadIdx.x) + i * kThreads;
      if (pixel < pixels) store(held.values[i], target, pixel);
    }
    if (pixels <= kAtOnce * kThreads) return;
    T const* const source = plane_of(plane);
    for (int i = int(threadIdx.x) + kAtOnce * kThreads; i < pixels; i += kThreads) {
      T pixel[kMostInputs];
      load(pixel, source, offset_of(i));
      store(pixel, target, i);
    }
  }

 private:
  // None where it is outside.
  __device__ __forceinline__ T const* plane_of(int plane) const {
    if (unsigned(plane) >= unsigned(p_.input_extent[0])) return nullptr;
    return sample_ + int64_t(plane) * p_.input_extent[1] * p_.input_extent[2];
  }
  __device__ __forceinline__ int offset_of(int pixel) const {
    int line, column;
    p_.columns(line, column, pixel);
    int const y = tile_.first_line / kStride + line + p_.shift[1], x = column + p_.shift[2];
    bool const inside = line < p_.box_lines && unsigned(y) < unsigned(p_.input_extent[1]) &&
                        unsigned(x) < unsigned(p_.input_extent[2]);
    return inside ? y * p_.input_extent[2] + x : kOutside;
  }
  __device__ __forceinline__ void load(T (&pixel)[kMostInputs], T const* plane, int offset) const {
    bool const inside = plane != nullptr && offset != kOutside;
#pragma unroll
    for (int c = 0; c < kMostInputs; ++c) {
      pixel[c] = T(0.0f);
      if (inside && c < p_.channels) pixel[c] = plane[c * p_.input_pixels + offset];
    }
  }
  __device__ __forceinline__ static void store(T const (&pixel)[kMostInputs], T* target, int at) {
    device::Pack<T, kMostInputs> pack;
#pragma unroll
    for (int c = 0; c < kMostInputs; ++c) pack.values[c] = P::staged(pixel[c]);
    pack.store(target + at * kMostInputs);
  }

  Params const& p_;
  Tile const& tile_;
  T* box_;
  T const* sample_;
  int offsets_[kAtOnce];
};

}  // namespace fusedconv::conv::few
