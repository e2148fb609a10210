// The kernel; schedule.hpp says what it computes and how.
#pragma once

#include <cstdint>
#include <type_traits>

#include "conv/few/forms.hpp"
#include "conv/few/lines.hpp"
#include "conv/few/params.hpp"
#include "conv/few/products.hpp"
#include "conv/few/staging.hpp"
#include "conv/few/sums.hpp"
#include "conv/round_each.hpp"
#include "conv/segment.hpp"
#include "cuda/async.hpp"
#include "cuda/math.hpp"
#include "groupnorm/affine.hpp"
#include "groupnorm/moments.hpp"

namespace fusedconv::conv::few {

// kMoments: of which moments are taken, and what is stored is before the activation.
template <Math kMath, bool kDeep, bool kMoments, class Known>
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
      float const bias =
          present && p.bias != nullptr ? device::to_float(static_cast<T const*>(p.bias)[k]) : 0.0f;
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        // In registers of their own, as the instruction has sums: else they are moved there for
        // each.
        asm volatile("mov.b32 %0, %1;" : "=f"(bias_[i / 2][row * 2 + i % 2]) : "f"(bias));
      }
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
    PlaneStaging<kMath> staging(p_, tile_, box_);
    int const first_input = tile_.first_plane / kStride + p_.shift[0];
    staging.begin(first_input);
    staging.end(first_input);
    __syncthreads();
    int buffer = 0;  // for outputs: where there are two, one is read meanwhile
    for (int z = tile_.first_plane; z < tile_.end_plane; ++z) {
      bool const odd = kDeep && z % kStride != 0;
      // Even planes of outputs meet one plane of inputs, the next ones this and another.
      int const next_input = z / kStride + p_.shift[0] + 1;
      bool const stages = kDeep && !odd && z + 1 < tile_.end_plane;
      if (stages) staging.begin(next_input);
      T* const target = first_ + int64_t(z) * p_.output_extent[1] * p_.output_extent[2];
      int const lead = int(reinterpret_cast<uintptr_t>(target) / sizeof(T) % kVector);
      T* const staged = staged_ + buffer * p_.staged_elements + lead;
      if (odd) {
        if constexpr (kDeep) compute_plane<true>(z, staged);
      } else {
        compute_plane<false>(z, staged);
      }
      if (stages) staging.end(next_input);
      if (p_.output != nullptr) before_store();
      __syncthreads();
      if (p_.output != nullptr) store(target, staged, lead);
      if (p_.buffers == 2) {
        buffer ^= 1;
      } else if (p_.output != nullptr) {
        wait_for_stores();
        __syncthreads();
      }
    }
    if constexpr (kMoments) leave_moments();
    if (p_.output != nullptr) wait_for_stores();
  }

 private:
  template <bool kOddPlane>
  __device__ __forceinline__ void compute_plane(int z, T const* staged) {
    int const units = p_.lines * p_.width_tiles;
    uint32_t const lane_staged =
        device::shared_address(staged) +
        uint32_t(channel_of(0, lane_) * p_.staged_channel + lane_ / 4 * kStride) * sizeof(T);
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
      int const width = p_.output_extent[2], begin = part * kQuotients * kStride;
      Columns const columns{begin + lane_ / 4 * kStride, width};
      bool const whole = begin + kQuotients * kStride <= width;
      uint32_t const at = lane_staged + uint32_t(line * kStride * width + begin) * sizeof(T);
      if (y < tile_.end_line) {
        Sums sums;
        multiply<kOddPlane, false>(inputs, sums);
        finish(sums, at, columns, whole);
      }
      if (y + 1 < tile_.end_line) {
        Sums sums;
        multiply<kOddPlane, true>(inputs, sums);
        finish(sums, at + uint32_t(width) * sizeof(T), columns, whole);
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
            float (&sum)[4] = sums.values[parity][half];
            if (z + y == 0) {
              P::add(sum, inputs[z][y], weight, bias_[half]);
            } else {
              P::add(sum, inputs[z][y], weight, sum);
            }
          }
        }
      }
    }
  }

  __device__ __forceinline__ void finish(Sums& sums, uint32_t staged, Columns const& columns,
                                         bool whole) {
    if (sizeof(T) == 2 && p_.rounds) {
#pragma unroll
      for (auto& parity : sums.values) {
#pragma unroll
        for (auto& half : parity) round_each<T>(half);
      }
    }
    if (kMoments && p_.output != nullptr) stage_line(sums, staged, columns, whole);
    if constexpr (std::is_same_v<Known, Any>) {
      if (p_.rough) {
        sums.each([](float& v) { v = RoughSilu::value(v); });
      } else {
        activate(p_.activation, sums);
      }
    } else {
      sums.each([](float& v) { v = Known::value(v); });
    }
    if constexpr (kMoments) {
      if (!begun_) moments_of_lane_.begin(sums);
      begun_ = true;
      if (whole) {
        moments_of_lane_.add<true>(sums, columns);
      } else {
        moments_of_lane_.add<false>(sums, columns);
      }
    } else {
      if (p_.affine.statistics != nullptr) {
#pragma unroll
        for (int i = 0; i < kSlots; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            float& v = sums.at(i, j / 2, j % 2);
            v = fmaf(v - affine_[i].mean, affine_[i].scale, affine_[i].shift);
          }
        }
        if constexpr (std::is_same_v<Known, Any>) activate(p_.affine.activation_after, sums);
      }
      stage_line(sums, staged, columns, whole);
    }
  }

  __device__ __forceinline__ static void activate(Activation activation, Sums& sums) {
    if (activation == Activation::kIdentity) return;
    dispatch_activation(activation, [&](auto form) {
      sums.each([](float& v) { v = device::quick_value<decltype(form)>(v); });
    });
  }

  __device__ __forceinline__ void stage_line(Sums& sums, uint32_t address, Columns const& columns,
                                             bool whole) const {
    StagedLine<T> const line(address, uint32_t(p_.staged_channel), columns);
    if (whole) {
      line.template store<true>(sums);
    } else {
      line.template store<false>(sums);
    }
  }

  // Before the barrier behind what is stored: copies of the plane before have read what the next
  // one overwrites.
  __device__ __forceinline__ void before_store() const {
    wait_for_stores();
#if __CUDA_ARCH__ >= 900
    device::fence_async_proxy();
#endif
  }
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
    if (int(threadIdx.x) < present) store_by_bulk(segment(int(threadIdx.x)));
#else
    // The next plane's barrier is behind these loads, and the one after it before they are
    // overwritten.
    for (int k = warp_; k < present; k += kWarps) {
      auto const each = segment(k);
      int const vectors = (each.lead + length + kVector - 1) / kVector;
      for (int i = lane_; i < vectors; i += kWarp) store_vector(each, i);
    }
#endif
  }

  __device__ __forceinline__ void leave_moments() {
    LaneMoments& own = moments_of_lane_;
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
  float bias_[2][4];  // of halves of the channels, as products begin with them
  groupnorm::ChannelAffine affine_[kSlots];
  LaneMoments moments_of_lane_;
};

template <Math kMath, bool kDeep, bool kMoments, class Known>
__global__ void __launch_bounds__(kThreads, kBlocks)
    convolve_few(__grid_constant__ Params const p) {
  extern __shared__ __align__(16) unsigned char shared[];
  Block<kMath, kDeep, kMoments, Known> block(p, shared);
  block.run();
}

}  // namespace fusedconv::conv::few
