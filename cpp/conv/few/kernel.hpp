// The kernel; schedule.hpp says what it computes and how.
#pragma once

#include <cstdint>
#include <type_traits>

#include "conv/few/edges.hpp"
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
  static constexpr int kVector = kVectorBytes / int(sizeof(T));
  static constexpr int kMemoryLine = kLineBytes / int(sizeof(T));
  // Whether means are part of the shifts. That costs values some 2^-24 of the mean, as much as they
  // were rounded by when they were summed, and outputs of 16 bits less than their own rounding
  // until that much of the mean is the deviation's size.
  static constexpr bool kFoldsMean = sizeof(T) == 2;

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
      for (int column = 0; column < 2; ++column) {
        // In registers of their own, as the instruction has sums, one of them a neighbouring
        // lane's, so that the compiler cannot know that they are alike: else it moves them there
        // for each product.
        bias_[i * 2 + column] = __shfl_xor_sync(~0u, Known::kScale * bias, column);
      }
      if (!kMoments && p.affine.statistics != nullptr && present) {
        affine_[i] = groupnorm::ChannelAffine::of(p.affine, tile_.sample, k);
        if constexpr (kFoldsMean) {
          affine_[i].shift = fmaf(-affine_[i].mean, affine_[i].scale, affine_[i].shift);
        }
      }
    }
    p.widths(first_unit_line_, first_unit_part_, warp_);
    stage_weights<kMath, kDeep, Known>(p, tile_, operands_);
    first_ = static_cast<T*>(p.output) +
             (int64_t(tile_.sample) * p.output_channels + tile_.channel) * p.output_pixels +
             int64_t(tile_.first_line) * p.output_extent[2];
  }

  __device__ __forceinline__ void run() {
    PlaneStaging<kMath> staging(p_, tile_, box_);
    int const first_input = tile_.first_plane / kStride + p_.shift[0];
    staging.store(staging.load(first_input), first_input, 0);
    __syncthreads();
    if constexpr (kMoments) begin_moments();
    // Where outputs are stored, the next plane of inputs is under way meanwhile.
    typename PlaneStaging<kMath>::Held held;
    if (kDeep && !kMoments) held = staging.load(first_input + 1);
    int slot = 0;    // of the plane of inputs that even outputs read
    int buffer = 0;  // for outputs: where there are two, one is read meanwhile
    for (int z = tile_.first_plane; z < tile_.end_plane; ++z) {
      bool const odd = kDeep && z % kStride != 0;
      // Even planes of outputs meet one plane of inputs, the next ones this and another.
      int const next_input = z / kStride + p_.shift[0] + 1;
      bool const stages = kDeep && !odd && z + 1 < tile_.end_plane;
      int const next_slot = slot == kPlaneSlots - 1 ? 0 : slot + 1;
      if (stages) {
        if (kMoments) held = staging.load(next_input);
        staging.store(held, next_input, next_slot);
      }
      T* const target = first_ + int64_t(z) * p_.output_extent[1] * p_.output_extent[2];
      int const lead = int(reinterpret_cast<uintptr_t>(target) / sizeof(T) % kMemoryLine);
      T* const staged = staged_ + buffer * p_.staged_elements + lead;
      if (odd) {
        if constexpr (kDeep) compute_plane<true>(slot, next_slot, staged, lead);
        slot = next_slot;
      } else {
        compute_plane<false>(slot, slot, staged, lead);
      }
      if (p_.output != nullptr) before_store();
      if (p_.output != nullptr || stages) __syncthreads();
      // Of the last plane too, so that no register holds what it would while planes are computed.
      if (!kMoments && odd) held = staging.load(next_input + 1);
      if (p_.output != nullptr) store(target, staged, lead);
      if (p_.buffers == 2) {
        buffer ^= 1;
      } else if (p_.output != nullptr) {
        waits_ = true;
      }
    }
    if constexpr (kMoments) leave_moments();
    if (p_.output != nullptr) wait_for_stores();
  }

 private:
  template <bool kOddPlane>
  using Inputs = uint32_t[taps_of(kOddPlane)][2][kGroups][P::kInputs];

  // From the slots of one plane of inputs and the next. lead: elements from a line of memory's
  // first to the target, of all threads alike.
  template <bool kOddPlane>
  __device__ __forceinline__ void compute_plane(int slot, int next_slot, T const* staged,
                                                int lead) {
    uint32_t const lane_staged =
        device::shared_address(staged) +
        uint32_t(channel_of(0, lane_) * p_.staged_channel + lane_ % 4 * kRun) * sizeof(T);
    int const width = p_.output_extent[2];
    int line = first_unit_line_, part = first_unit_part_;
#pragma unroll 1
    while (line < p_.lines) {
      Inputs<kOddPlane> inputs;
      load(inputs, slot, next_slot, line, part);
      int const y = tile_.first_line + line * kStride, begin = part * kQuotients * kStride;
      int const here = min(width - begin, kQuotients * kStride);
      int const rest = here - lane_ % 4 * kRun;
      bool const whole = here == kQuotients * kStride;
      uint32_t const at = lane_staged + uint32_t(line * kStride * width + begin) * sizeof(T);
      if (y < tile_.end_line) {
        Sums sums;
        multiply<kOddPlane, false>(inputs, sums);
        finish(sums, at, lead, rest, whole);
      }
      if (y + 1 < tile_.end_line) {
        Sums sums;
        multiply<kOddPlane, true>(inputs, sums);
        finish(sums, at + uint32_t(width) * sizeof(T), lead + width, rest, whole);
      }
      line += p_.unit_lines;
      part += p_.unit_widths;
      if (part >= p_.width_tiles) {
        part -= p_.width_tiles;
        ++line;
      }
    }
  }

  template <int kPlanes>
  __device__ __forceinline__ void load(uint32_t (&inputs)[kPlanes][2][kGroups][P::kInputs],
                                       int slot, int next_slot, int line, int part) const {
    uint32_t const* const box = reinterpret_cast<uint32_t const*>(box_) + P::lane_word(lane_);
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) {
      int const first = (plane == 0 ? slot : next_slot) * p_.box_lines + line;
      int const pixel = first * p_.box_columns + part * kQuotients;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          P::load(inputs[plane][i][group], box + (pixel + i * p_.box_columns) * P::kWords, group);
        }
      }
    }
  }

  // A shift from the values of the warp's first line, were it one of the output, of which its first
  // lane of a channel always has one.
  __device__ __forceinline__ void begin_moments() {
    if (first_unit_line_ >= p_.lines) return;
    Inputs<false> inputs;
    load(inputs, 0, 0, first_unit_line_, first_unit_part_);
    Sums sums;
    multiply<false, false>(inputs, sums);
    round_sums(sums);
    activate_first(sums);
    moments_of_lane_.begin(sums);
  }

  template <bool kOddPlane, bool kOddLine>
  __device__ __forceinline__ void multiply(Inputs<kOddPlane> const& inputs, Sums& sums) const {
    constexpr int kFirst = first_product(kOddPlane, kOddLine);
    constexpr int kProducts = taps_of(kOddPlane) * taps_of(kOddLine);
    using Quad = device::Pack<uint32_t, 4>;
    auto const quad = [&](int i) { return Quad::load(operands_ + (i * kWarp + lane_) * 4); };
    auto const input = [&](int product, int group) -> auto const& {
      return kOddPlane ? inputs[product % 2][product / 2][group] : inputs[0][product][group];
    };
    if constexpr (P::kPairs && kProducts == 1) {
      Quad const weights = quad(0);
      each_sum(sums, [&](float (&sum)[4], int parity, int group) {
        uint32_t const weight[2] = {weights.values[parity * 2], weights.values[parity * 2 + 1]};
        P::add(sum, weight, input(0, group), bias_);
      });
    } else {
      constexpr int kStep = P::kPairs ? 2 : 1;
#pragma unroll
      for (int i = 0; i < kProducts; i += kStep) {
        // Behind the quad of the first product, where that is both parities'.
        int const first = P::kPairs ? kFirst + i : (kFirst + i) * 2;
        Quad const weights[2] = {quad(first), quad(first + 1)};
        each_sum(sums, [&](float (&sum)[4], int parity, int group) {
          auto const& weight = weights[parity].values;
          float const(&c)[4] = i == 0 ? bias_ : static_cast<float const(&)[4]>(sum);
          if constexpr (P::kPairs) {
            P::add_two(sum, weight, input(i, group), input(i + 1, group), c);
          } else {
            P::add(sum, weight, input(i, group), c);
          }
        });
      }
    }
  }

  template <class Body>
  __device__ __forceinline__ static void each_sum(Sums& sums, Body const& body) {
#pragma unroll
    for (int parity = 0; parity < 2; ++parity) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        body(sums.values[parity][group], parity, group);
      }
    }
  }

  __device__ __forceinline__ void finish(Sums& sums, uint32_t staged, int place, int rest,
                                         bool whole) {
    round_sums(sums);
    if constexpr (kMoments && Known::kMayRound) {
      if (p_.output != nullptr) stage_line(sums, staged, place, rest, whole);
    }
    activate_first(sums);
    if constexpr (kMoments) {
      if (whole) {
        moments_of_lane_.add<true>(sums, rest);
      } else {
        moments_of_lane_.add<false>(sums, rest);
      }
    } else {
      if (p_.affine.statistics != nullptr) {
#pragma unroll
        for (int i = 0; i < kSlots; ++i) {
#pragma unroll
          for (int j = 0; j < kRun; ++j) {
            float& v = sums.at(i, j);
            if (!kFoldsMean) v -= affine_[i].mean;
            v = fmaf(v, affine_[i].scale, affine_[i].shift);
          }
        }
        if constexpr (std::is_same_v<Known, Any>) activate(p_.affine.activation_after, sums);
      }
      stage_line(sums, staged, place, rest, whole);
    }
  }

  __device__ __forceinline__ void round_sums(Sums& sums) const {
    if (sizeof(T) == 2 && Known::kMayRound && p_.rounds) {
#pragma unroll
      for (auto& parity : sums.values) {
#pragma unroll
        for (auto& group : parity) round_each<T>(group);
      }
    }
  }

  __device__ __forceinline__ void activate_first(Sums& sums) const {
    if constexpr (std::is_same_v<Known, Any>) {
      if (p_.rough) {
        sums.each([](float& v) { v = RoughSilu::value(RoughSilu::kScale * v); });
      } else {
        activate(p_.activation, sums);
      }
    } else {
      sums.each([](float& v) { v = Known::value(v); });
    }
  }

  __device__ __forceinline__ static void activate(Activation activation, Sums& sums) {
    if (activation == Activation::kIdentity) return;
    dispatch_activation(activation, [&](auto form) {
      sums.each([](float& v) { v = device::quick_value<decltype(form)>(v); });
    });
  }

  __device__ __forceinline__ void stage_line(Sums& sums, uint32_t address, int place, int rest,
                                             bool whole) {
    make_room();
    StagedLine<T> const line(address, p_.staged_channel, place, rest);
    if (p_.vectors && place % kVector == 0) {
      line.store_vectors(sums);
    } else if (whole) {
      line.template store<true>(sums);
    } else {
      line.template store<false>(sums);
    }
  }

  // Before a plane's first output is staged, once in a plane: where there is one buffer, copies of
  // the plane before have read it.
  __device__ __forceinline__ void make_room() {
    if (!waits_) return;
    waits_ = false;
    wait_for_stores();
    __syncthreads();
  }

  // Before the barrier behind what is stored: where there are two buffers, copies of the plane
  // before have read what the next one overwrites.
  __device__ __forceinline__ void before_store() {
    make_room();
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
    // All warps have as many copies, and each element around these is a thread's: who has more
    // keeps the others waiting.
    constexpr int kEach = kBlockChannels / kWarps;
    int const copied = warp_ * kEach + lane_;
    if (lane_ < kEach && copied < present) store_whole(segment(copied));
    constexpr int kEdges = kThreads / kBlockChannels;
    static_assert(kEdges >= 2 * kVector);
    int const k = int(threadIdx.x) / kEdges;
    if (k < present) store_edge(segment(k), int(threadIdx.x) % kEdges);
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
    for (int step = 1; step < 4; step *= 2) {
      count += __shfl_xor_sync(~0u, count, step);
#pragma unroll
      for (int i = 0; i < kSlots; ++i) {
        own.sum[i] += __shfl_xor_sync(~0u, own.sum[i], step);
        own.squares[i] += __shfl_xor_sync(~0u, own.squares[i], step);
      }
    }
    if (lane_ % 4 == 0) {
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
  int first_unit_line_, first_unit_part_;  // along width
  bool waits_ = false;                     // for what is copied, before the next output is staged
  device::Moments* moments_;
  uint32_t* operands_;
  T* box_;
  T* staged_;
  T* first_;
  float bias_[4];  // as products begin with it
  groupnorm::ChannelAffine affine_[kSlots];
  LaneMoments moments_of_lane_;
};

template <Math kMath, bool kDeep, bool kMoments, class Known>
__global__ void __launch_bounds__(kThreads, blocks_of(kMath, kMoments))
    convolve_few(__grid_constant__ Params const p) {
  extern __shared__ __align__(kLineBytes) unsigned char shared[];
  Block<kMath, kDeep, kMoments, Known> block(p, shared);
  block.run();
}

}  // namespace fusedconv::conv::few
