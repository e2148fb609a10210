// The kernel; schedule.hpp says what it computes and how.
#pragma once

#include <cstdint>

#include "conv/few/params.hpp"
#include "conv/few/products.hpp"
#include "conv/segment.hpp"
#include "cuda/async.hpp"
#include "cuda/math.hpp"
#include "cuda/pair.hpp"
#include "groupnorm/affine.hpp"
#include "groupnorm/moments.hpp"

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
// plane and of the line in that.
__device__ __forceinline__ constexpr int first_product(bool odd_plane, bool odd_line) {
  return odd_plane ? (odd_line ? 5 : 3) : (odd_line ? 1 : 0);
}

// The weights' operands to shared memory: [product, lane, parity along width, half of the channels,
// register].
template <Math kMath, bool kDeep>
__device__ __forceinline__ void stage_weights(Params const& p, Tile const& tile,
                                              uint32_t* operands) {
  using P = Products<kMath>;
  using T = typename P::Element;
  T const* const weight = static_cast<T const*>(p.weight);
  constexpr int kRegisters = kOperands * kWarp * P::kWeights;
  for (int i = int(threadIdx.x); i < kRegisters; i += kThreads) {
    int const word = i % P::kWeights, list = i / P::kWeights;
    int const half = list % 2, parity = list / 2 % 2, lane = list / 4 % kWarp;
    int const product = list / (4 * kWarp);
    bool const odd_plane = product >= 3;
    bool const odd_line = odd_plane ? product >= 5 : product >= 1;
    int const number = product - first_product(odd_plane, odd_line);
    int const z = number / taps_of(odd_line), y = number % taps_of(odd_line);
    int const k = tile.channel + half * 8 + lane / 4;
    device::Pack<T, P::kPerRegister> pack;
#pragma unroll
    for (int v = 0; v < P::kPerRegister; ++v) {
      int neighbour, channel;
      P::place(lane, P::kPerRegister == 1 ? word : v, neighbour, channel);
      T value = T(0.0f);
      bool const met = parity == 1 || neighbour == 0;
      if (met && channel < p.channels && k < p.output_channels && (kDeep || !odd_plane)) {
        int const t = kDeep ? tap_of(odd_plane, z) : 0;
        value =
            weight[channel * p.stride_c + k * p.stride_k + t * p.stride_t +
                   tap_of(odd_line, y) * p.stride_r + tap_of(parity == 1, neighbour) * p.stride_s];
      }
      pack.values[v] = P::staged(value);
    }
    operands[i] = pack.bits[0];
  }
}

// A plane of the input under the tile, zeros outside: [line, column, channel].
template <Math kMath>
__device__ __forceinline__ void stage_plane(Params const& p, Tile const& tile, int plane,
                                            typename Products<kMath>::Element* box) {
  using P = Products<kMath>;
  using T = typename P::Element;
  int const height = p.input_extent[1], width = p.input_extent[2];
  T* const target = box + (plane & 1) * p.box_lines * p.box_columns * kMostInputs;
  bool const inside = unsigned(plane) < unsigned(p.input_extent[0]);
  T const* const source = static_cast<T const*>(p.input) +
                          int64_t(tile.sample) * p.channels * p.input_pixels +
                          int64_t(plane) * height * width;
  for (int i = int(threadIdx.x); i < p.box_lines * p.box_columns; i += kThreads) {
    int line, column;
    p.columns(line, column, i);
    int const y = tile.first_line / kStride + line + p.shift[1], x = column + p.shift[2];
    device::Pack<T, kMostInputs> pixel;
    if (inside && unsigned(y) < unsigned(height) && unsigned(x) < unsigned(width)) {
#pragma unroll
      for (int c = 0; c < kMostInputs; ++c) {
        if (c < p.channels) pixel.values[c] = P::staged(source[c * p.input_pixels + y * width + x]);
      }
    }
    pixel.store(target + i * kMostInputs);
  }
}

// Of four channels of a lane: kSlots of two halves of a block's channels, 2 t and 2 t + 1 of each.
inline constexpr int kSlots = 4;
__device__ __forceinline__ int channel_of(int slot, int lane) {
  return slot / 2 * 8 + lane % 4 * 2 + slot % 2;
}

// Sums about a shift that lanes of the same channels have in common: one of their values.
struct LaneMoments {
  float shift[kSlots] = {}, sum[kSlots] = {}, squares[kSlots] = {};
  int count = 0;  // of each

  __device__ __forceinline__ void begin(float const (&first)[kSlots]) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) shift[i] = __shfl_sync(~0u, first[i], threadIdx.x % 4);
  }
  __device__ __forceinline__ void add(int i, float value) {
    float const deviation = value - shift[i];
    sum[i] += deviation;
    squares[i] = fmaf(deviation, deviation, squares[i]);
  }
};

// Sixteen quotients of a line of outputs: sums by the parity along width, the half of the channels,
// and as the instruction has them.
using Sums = float[2][2][4];

// kMoments: of which moments are taken, and what is stored is before the activation.
template <Math kMath, bool kDeep, bool kMoments>
class Block {
  using P = Products<kMath>;
  using T = typename P::Element;
  static constexpr int kVector = 16 / int(sizeof(T));

 public:
  __device__ __forceinline__ Block(Params const& p, unsigned char* shared)
      : p_(p),
        tile_(p),
        lane_(int(threadIdx.x) % kWarp),
        warp_(int(threadIdx.x) / kWarp),
        moments_(reinterpret_cast<device::Moments*>(shared)),
        operands_(reinterpret_cast<uint32_t*>(shared + kMomentsBytes)),
        box_(reinterpret_cast<T*>(shared + kMomentsBytes + p.operand_bytes)),
        staged_(reinterpret_cast<T*>(shared + kMomentsBytes + p.operand_bytes + p.box_bytes)) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      int const k = tile_.channel + channel_of(i, lane_);
      bool const present = k < p.output_channels;
      bias_[i] =
          present && p.bias != nullptr ? device::to_float(static_cast<T const*>(p.bias)[k]) : 0.0f;
      if (!kMoments && p.affine.statistics != nullptr && present) {
        affine_[i] = groupnorm::ChannelAffine::of(p.affine, tile_.sample, k);
      }
    }
    stage_weights<kMath, kDeep>(p, tile_, operands_);
    first_ = static_cast<T*>(p.output) +
             (int64_t(tile_.sample) * p.output_channels + tile_.channel) * p.output_pixels +
             int64_t(tile_.first_line) * p.output_extent[2];
  }

  __device__ __forceinline__ void run() {
    for (int z = tile_.first_plane; z < tile_.end_plane; ++z) {
      bool const odd = kDeep && z % kStride != 0;
      if (p_.output != nullptr) wait_for_stores();
      if (z == tile_.first_plane) stage(z / kStride);
      if (odd) stage(z / kStride + 1);
      __syncthreads();
      T* const target = first_ + int64_t(z) * p_.output_extent[1] * p_.output_extent[2];
      int const lead = int(reinterpret_cast<uintptr_t>(target) / sizeof(T) % kVector);
      if (odd) {
        if constexpr (kDeep) compute_plane<true>(z, staged_ + lead);
      } else {
        compute_plane<false>(z, staged_ + lead);
      }
      if (p_.output != nullptr) store(target, staged_ + lead, lead);
    }
    if constexpr (kMoments) leave_moments();
#if __CUDA_ARCH__ >= 900
    if (p_.output != nullptr) device::wait_stores_read();
#endif
  }

 private:
  __device__ __forceinline__ void stage(int quotient) const {
    stage_plane<kMath>(p_, tile_, quotient + p_.shift[0], box_);
  }

  template <bool kOddPlane>
  __device__ __forceinline__ void compute_plane(int z, T* staged) {
    int const units = p_.lines * p_.width_tiles;
#pragma unroll 1
    for (int unit = warp_; unit < units; unit += kWarps) {
      int line, part;
      p_.widths(line, part, unit);
      uint32_t inputs[taps_of(kOddPlane)][2][P::kInputs];
#pragma unroll
      for (int plane = 0; plane < taps_of(kOddPlane); ++plane) {
        int const slot = (z / kStride + p_.shift[0] + plane) & 1;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          int const at = (slot * p_.box_lines + line + i) * p_.box_columns + part * kQuotients;
          P::load(inputs[plane][i], box_ + at * kMostInputs, lane_);
        }
      }
      int const y = tile_.first_line + line * kStride;
      if (y < tile_.end_line) {
        Sums sums;
        multiply<kOddPlane, false>(inputs, sums);
        finish(sums, staged, y, part);
      }
      if (y + 1 < tile_.end_line) {
        Sums sums;
        multiply<kOddPlane, true>(inputs, sums);
        finish(sums, staged, y + 1, part);
      }
    }
  }

  template <bool kOddPlane, bool kOddLine>
  __device__ __forceinline__ void multiply(
      uint32_t const (&inputs)[taps_of(kOddPlane)][2][P::kInputs], Sums& sums) const {
    uint32_t const* weights =
        operands_ + (first_product(kOddPlane, kOddLine) * kWarp + lane_) * 4 * P::kWeights;
#pragma unroll
    for (int z = 0; z < taps_of(kOddPlane); ++z) {
#pragma unroll
      for (int y = 0; y < taps_of(kOddLine); ++y) {
        auto const pack = device::Pack<uint32_t, 4 * P::kWeights>::load(weights);
        weights += kWarp * 4 * P::kWeights;
#pragma unroll
        for (int parity = 0; parity < 2; ++parity) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            uint32_t weight[P::kWeights];
#pragma unroll
            for (int i = 0; i < P::kWeights; ++i) {
              weight[i] = pack.values[(parity * 2 + half) * P::kWeights + i];
            }
            float (&sum)[4] = sums[parity][half];
            if (z + y == 0) {
              float const bias[4] = {bias_[half * 2], bias_[half * 2 + 1], bias_[half * 2],
                                     bias_[half * 2 + 1]};
              P::add(sum, inputs[z][y], weight, bias);
            } else {
              P::add(sum, inputs[z][y], weight, sum);
            }
          }
        }
      }
    }
  }

  // Sums of a slot: parity along width, and whether of quotients g or g + 8.
  __device__ __forceinline__ static float& value(Sums& sums, int slot, int high, int parity) {
    return sums[parity][slot / 2][high * 2 + slot % 2];
  }

  __device__ __forceinline__ void finish(Sums& sums, T* staged, int y, int part) {
    int const width = p_.output_extent[2];
    int const x = (part * kQuotients + lane_ / 4) * kStride;
    T* const line = staged + (y - tile_.first_line) * width + x;
    if (sizeof(T) == 2 && p_.rounds) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        float& v = (&sums[0][0][0])[i];
        v = device::as_stored<T>(v);
      }
    }
    if (kMoments && p_.output != nullptr) stage_line(sums, line, x);
    activate(p_.activation, sums);
    if constexpr (kMoments) {
      add_moments(sums, part, x);
    } else {
      if (p_.affine.statistics != nullptr) {
        for_values([&](int i, int high, int parity) {
          float& v = value(sums, i, high, parity);
          v = fmaf(v - affine_[i].mean, affine_[i].scale, affine_[i].shift);
        });
        activate(p_.affine.activation_after, sums);
      }
      stage_line(sums, line, x);
    }
  }

  template <class Body>
  __device__ __forceinline__ static void for_values(Body const& body) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) body(i, j / 2, j % 2);
    }
  }

  __device__ __forceinline__ static void activate(Activation activation, Sums& sums) {
    if (activation == Activation::kIdentity) return;
    dispatch_activation(activation, [&](auto a) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        float& v = (&sums[0][0][0])[i];
        v = device::quick_value<decltype(a)>(v);
      }
    });
  }

  __device__ __forceinline__ void add_moments(Sums& sums, int part, int x) {
    int const width = p_.output_extent[2];
    if (lane_moments_.count == 0 && !begun_) {
      float first[kSlots];
#pragma unroll
      for (int i = 0; i < kSlots; ++i) first[i] = value(sums, i, 0, 0);
      lane_moments_.begin(first);
      begun_ = true;
    }
    if ((part + 1) * kQuotients * kStride <= width) {
      for_values(
          [&](int i, int high, int parity) { lane_moments_.add(i, value(sums, i, high, parity)); });
      lane_moments_.count += 4;
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        bool const inside = x + j / 2 * 8 * kStride + j % 2 < width;
#pragma unroll
        for (int i = 0; i < kSlots; ++i) {
          lane_moments_.add(i, inside ? value(sums, i, j / 2, j % 2) : lane_moments_.shift[i]);
        }
        lane_moments_.count += inside;
      }
    }
  }

  // Lines begin anywhere.
  __device__ __forceinline__ void stage_line(Sums& sums, T* line, int x) const {
    int const width = p_.output_extent[2];
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      T* const channel = line + channel_of(i, lane_) * p_.staged_channel;
      bool const aligned = reinterpret_cast<uintptr_t>(channel) % (2 * sizeof(T)) == 0;
#pragma unroll
      for (int high = 0; high < 2; ++high) {
        T* const target = channel + high * 8 * kStride;
        int const count = min(2, width - (x + high * 8 * kStride));
        float const even = value(sums, i, high, 0), odd = value(sums, i, high, 1);
        if (sizeof(T) == 2 && aligned && count == 2) {
          if constexpr (sizeof(T) == 2) {
            *reinterpret_cast<uint32_t*>(target) = device::from_pair<T>(even, odd);
          }
        } else {
          if (count > 0) target[0] = device::from_float<T>(even);
          if (count > 1) target[1] = device::from_float<T>(odd);
        }
      }
    }
  }

  // Two barriers of the block belong to staged outputs: one behind what is written, one before it
  // is written again, which is that of the inputs.
  __device__ __forceinline__ void wait_for_stores() const {
#if __CUDA_ARCH__ >= 900
    device::wait_stores_read();
#endif
  }
  __device__ __forceinline__ void store(T* target, T const* source, int lead) const {
    int const length = (tile_.end_line - tile_.first_line) * p_.output_extent[2];
    int const present = min(kBlockChannels, p_.output_channels - tile_.channel);
    auto const segment = [&](int k) {
      return Segment<T>{source + k * p_.staged_channel, target + k * p_.output_pixels,
                        (lead + k * p_.staged_channel) % kVector, length};
    };
#if __CUDA_ARCH__ >= 900
    device::fence_async_proxy();
    __syncthreads();
    if (int(threadIdx.x) < present) store_by_bulk(segment(int(threadIdx.x)));
#else
    __syncthreads();
    for (int k = warp_; k < present; k += kWarps) {
      auto const each = segment(k);
      int const vectors = (each.lead + length + kVector - 1) / kVector;
      for (int i = lane_; i < vectors; i += kWarp) store_vector(each, i);
    }
#endif
  }

  __device__ __forceinline__ void leave_moments() {
    LaneMoments& own = lane_moments_;
    int count = own.count;
#pragma unroll
    for (int step = 4; step < kWarp; step *= 2) {
      count += __shfl_xor_sync(~0u, count, step);
#pragma unroll
      for (int i = 0; i < kSlots; ++i) {
        own.sum[i] += __shfl_xor_sync(~0u, own.sum[i], step);
        own.squares[i] += __shfl_xor_sync(~0u, own.squares[i], step);
      }
    }
    if (lane_ < 4) {
#pragma unroll
      for (int i = 0; i < kSlots; ++i) {
        moments_[warp_ * kBlockChannels + channel_of(i, lane_)] =
            count == 0
                ? device::Moments()
                : device::shifted_moments(float(count), own.shift[i], own.sum[i], own.squares[i]);
      }
    }
    __syncthreads();
    int const k = int(threadIdx.x);
    if (k >= kBlockChannels || tile_.channel + k >= p_.output_channels) return;
    device::Moments all;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) all.merge(moments_[warp * kBlockChannels + k]);
    int64_t const slot =
        int64_t(tile_.sample) * p_.depth_tiles.divisor * p_.tiles_h.divisor + tile_.slot;
    p_.partials[slot * p_.output_channels + tile_.channel + k] = all.partial();
  }

  Params const& p_;
  Tile tile_;
  int lane_, warp_;
  device::Moments* moments_;
  uint32_t* operands_;
  T* box_;
  T* staged_;
  T* first_;
  bool begun_ = false;
  float bias_[kSlots];
  groupnorm::ChannelAffine affine_[kSlots];
  LaneMoments lane_moments_;
};

template <Math kMath, bool kDeep, bool kMoments>
__global__ void __launch_bounds__(kThreads, kBlocks)
    convolve_few(__grid_constant__ Params const p) {
  extern __shared__ __align__(16) unsigned char shared[];
  Block<kMath, kDeep, kMoments> block(p, shared);
  block.run();
}

}  // namespace fusedconv::conv::few
