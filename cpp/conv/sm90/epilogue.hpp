// What becomes of a warpgroup's accumulators. A thread holds two channels, eight apart, and of each
// octet of positions two: an accumulator fragment of the instruction. Of a piece of 16 elements at
// a time:
// 1. The bias is added, the activation applied.
// 2. The values, before or after it, are stored in the order in which threads hold them.
// 3. Those that are pixels enter sums about a shift.
// Then four lanes merge their moments of a channel, and one of them stores the tile's.
#pragma once

#include <cstdint>

#include "conv/sm90/params.hpp"
#include "conv/sm90/traits.hpp"
#include "cuda/math.hpp"
#include "fusedconv/activation.hpp"
#include "groupnorm/moments.hpp"

namespace fusedconv::conv::sm90 {

// A tile's accumulators are finished in pieces by one loop: as straight code for all its elements
// the epilogue would wait for instructions most of its time. Registers have no index, hence the
// comparisons.
inline constexpr int kPiece = 16;

template <int kFirst, int kSize>
__device__ __forceinline__ void take_piece(float const (&sum)[kSize], int piece,
                                           float (&v)[kPiece]) {
  if (piece == kFirst) {
#pragma unroll
    for (int i = 0; i < kPiece; ++i) v[i] = sum[kFirst * kPiece + i];
  } else if constexpr ((kFirst + 1) * kPiece < kSize) {
    take_piece<kFirst + 1>(sum, piece, v);
  }
}

// Quick forms are off by less than what rounding operands costs, so strict fp32 has none of them.
template <class Traits>
__device__ __forceinline__ void activate_piece(Activation activation, float (&v)[kPiece]) {
  dispatch_activation(activation, [&](auto form) {
    using Form = decltype(form);
#pragma unroll
    for (float& value : v) {
      value = Traits::kSplits ? Form::value(value) : device::quick_value<Form>(value);
    }
  });
}

// Sums about a shift that is one of the values, so that a large mean costs no precision.
struct ShiftedMoments {
  float shift = 0.0f, sum = 0.0f, squares = 0.0f;
  __device__ __forceinline__ void add(float value) {
    float const difference = value - shift;
    sum += difference;
    squares = fmaf(difference, difference, squares);
  }
  __device__ __forceinline__ device::Moments moments(int count) const {
    return count == 0 ? device::Moments{}
                      : device::shifted_moments(float(count), shift, sum, squares);
  }
};

// A lane's elements of a piece, in 16-byte vectors that lie 32 lanes apart. The values become what
// is stored of them.
template <class T>
__device__ __forceinline__ void store_piece(T* target, float (&values)[kPiece]) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < kPiece; i += 4) {
      *reinterpret_cast<float4*>(target + i * 32) =
          make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPiece; i += 8) {
      device::Pack<T, 8> pack;
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        pack.values[k] = device::from_float<T>(values[i + k]);
        values[i + k] = device::to_float(pack.values[k]);
      }
      pack.store(target + i * 32);
    }
  }
}

// Of the warpgroup's tile at position0, the 16 channels from channel0 on that a warp accumulates.
template <class Traits, bool kWraps>
__device__ __forceinline__ void finish_tile(Params const& p,
                                            float const (&accumulators)[Traits::kAccumulators],
                                            Tile const& tile, int position0, int channel0,
                                            float bias0, float bias1) {
  using T = typename Traits::Element;
  constexpr int kSize = Traits::kAccumulators;
  int const lane = threadIdx.x % 32;
  int const channel = channel0 + lane / 4;  // and the eighth after it
  int const column = lane % 4 * 2;
  Octet const own(p.raster, tile.strip, position0 + lane * 8);
  bool const keep0 = channel < p.out_channels;
  bool const keep1 = channel + 8 < p.out_channels;
  int64_t const warpgroup_tile = int64_t(tile.sample) * p.raster.warpgroup_tiles +
                                 tile.strip * p.raster.strip_warpgroup_tiles +
                                 position0 / Traits::kBlockN;
  T* const fragment = static_cast<T*>(p.output) +
                      (warpgroup_tile * p.blocks_m * kBlockM + channel0) * Traits::kBlockN +
                      lane * (16 / sizeof(T));
  ShiftedMoments moments0, moments1;
  int const count = own.count_of_columns<kSize / 4>();
  bool shifted = false;
#pragma unroll 1
  for (int piece = 0; piece < kSize / kPiece; ++piece) {
    float values[kPiece];
    Octet octets[kPiece / 4];
#pragma unroll
    for (int j = 0; j < kPiece / 4; ++j) {
      octets[j] = own.broadcast<kWraps>(piece * (kPiece / 4) + j);
    }
    take_piece<0>(accumulators, piece, values);
    // Elements alternate between the two channels, two by two.
#pragma unroll
    for (int i = 0; i < kPiece; ++i) values[i] += i % 4 < 2 ? bias0 : bias1;
    if (!p.activates_output) store_piece(fragment + piece * kPiece * 32, values);
    activate_piece<Traits>(p.activation, values);
    if (p.activates_output) store_piece(fragment + piece * kPiece * 32, values);
    if (!shifted) {
#pragma unroll
      for (int j = kPiece / 4 - 1; j >= 0; --j) {
#pragma unroll
        for (int e = 1; e >= 0; --e) {
          if (octets[j].valid<kWraps>(column + e)) {
            moments0.shift = values[4 * j + e];
            moments1.shift = values[4 * j + 2 + e];
            shifted = true;
          }
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kPiece / 4; ++j) {
      Octet const& octet = octets[j];
      float const* const v = values + 4 * j;
      bool const valid0 = octet.valid<kWraps>(column);
      bool const valid1 = octet.valid<kWraps>(column + 1);
      if (valid0) {
        moments0.add(v[0]);
        moments1.add(v[2]);
      }
      if (valid1) {
        moments0.add(v[1]);
        moments1.add(v[3]);
      }
    }
  }
  if (p.partials == nullptr) return;
  auto const total0 = device::merge_warp<4>(moments0.moments(count));
  auto const total1 = device::merge_warp<4>(moments1.moments(count));
  if (lane % 4 == 0) {
    groupnorm::Partial* const target = p.partials + warpgroup_tile * p.out_channels;
    if (keep0) target[channel] = total0.partial();
    if (keep1) target[channel + 8] = total1.partial();
  }
}

}  // namespace fusedconv::conv::sm90
