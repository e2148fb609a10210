// Bias, scale and shift of columns, and what normalises them.
//
// Threads load the bias of their columns, in front of the products where registers allow, and leave
// it, with what else there is, in the consumer's shared memory for all: beside the last products or
// behind them.
#pragma once

#include <cstdint>
#include <numeric>

#include "conv/sm90/boxes/columns.hpp"
#include "cuda/async.hpp"
#include "cuda/early.hpp"
#include "cuda/math.hpp"

namespace fusedconv::conv::sm90::boxes {

// What GroupNorm does to a channel of a sample once the bias is added: it takes the mean off first,
// so that of a group of equal values nothing is left, then scales what is left.
struct Normalizing {
  float mean = 0.0f, scale = 1.0f, shift = 0.0f;
};

__device__ __forceinline__ Normalizing normalizing_map(Params const& p, int sample, int channel) {
  GroupStatistics const& g = p.group;
  int group, within;
  p.group_channels(group, within, channel);
  groupnorm::Statistics const own = g.statistics[sample * g.groups + group];
  float const weight = g.weight ? device::load_as_float(g.weight, channel, g.dtype) : 1.0f;
  float const bias = g.bias ? device::load_as_float(g.bias, channel, g.dtype) : 0.0f;
  float const scale = own.rstd * weight;
  return {own.mean, scale, fmaf(-own.low, scale, bias)};
}

// By column.
template <class Traits>
struct ColumnValues {
  float2 linear[Traits::kColumns];  // scale and shift
  float means[Traits::kColumns];    // of groups
  float2 affine[Traits::kColumns];  // what is multiplied and added behind a norm

  __device__ __forceinline__ static ColumnValues& in(unsigned char* shared) {
    static_assert(sizeof(ColumnValues) <= Memory::kPortionBytes);
    static_assert(sizeof(ColumnValues) == Traits::kColumns * Memory::kColumnBytes);
    return *reinterpret_cast<ColumnValues*>(shared);
  }
};

// A thread's columns. As they are loaded: what is computed of them would be waited for.
template <class Traits, Extra kExtra>
class OwnColumns {
 public:
  // Bias and a pixel's norm, in front of the products where these leave a thread registers for its
  // only column, else when they are left.
  static constexpr bool kEarly = Traits::kScarce;
  static_assert(!kEarly || Traits::kColumns <= kWarpgroupThreads);

  __device__ __forceinline__ void load_early(Params const& p, Block const& block,
                                             Consumer const& self) {
    if constexpr (kEarly) {
      if (p.bias != nullptr || kExtra == Extra::kNormalizesPixels) load_all(p, block, self.thread);
    }
  }

  // Where an epilogue reads no values, there are none to leave. Whoever writes the shared memory
  // next waits for all of the consumer's threads first.
  __device__ __forceinline__ void leave(Params const& p, Block const& block, Slab const& slab,
                                        Result result, Consumer const& self,
                                        ColumnValues<Traits>& values) {
    bool const by_group = kExtra == Extra::kNone && p.group.statistics != nullptr;
    if (!p.is_linear && !by_group && kExtra != Extra::kNormalizesPixels) return;
    if constexpr (!kEarly) load_all(p, block, self.thread);
    write(p, block, by_group ? &slab : nullptr, result, self.thread, values,
          [&] { finish_copies(self); });
    self.sync();
  }

  // The values of the output that all tiles have, by kWarpgroupThreads threads.
  __device__ __forceinline__ void keep(Params const& p, Block const& block, int thread,
                                       ColumnValues<Traits>& values) {
    load_all(p, block, thread);
    write(p, block, nullptr, Result::kOutput, thread, values, [] {});
  }

 private:
  using T = typename Traits::Element;
  static constexpr int kOwn = (Traits::kColumns + kWarpgroupThreads - 1) / kWarpgroupThreads;

  __device__ __forceinline__ void load_all(Params const& p, Block const& block, int thread) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) load(p, block, thread, i);
  }

  // slab: whose GroupNorm is applied, or null. wait: until `values` may be written.
  template <class Wait>
  __device__ __forceinline__ void write(Params const& p, Block const& block, Slab const* slab,
                                        Result result, int thread, ColumnValues<Traits>& values,
                                        Wait const& wait) const {
    bool const output = result == Result::kOutput;
    bool const scales = output && p.scale != nullptr, shifts = output && p.shift != nullptr;
    if (scales || shifts) device::wait_for_launch_in_front();
    // All are under way before any is waited for.
    float scale[kOwn], shift[kOwn];
    Normalizing group[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      scale[i] = 1.0f;
      shift[i] = 0.0f;
      if (!scales && !shifts && slab == nullptr) continue;
      ColumnPlace const at(p, block, thread + i * kWarpgroupThreads);
      if (!at.present || at.channel >= p.own_channels) continue;
      if (scales) scale[i] = p.scale[at.channel];
      if (shifts) shift[i] = p.shift[at.channel];
      if (slab != nullptr) group[i] = normalizing_map(p, slab->sample, at.channel);
    }
    wait();
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      int const column = thread + i * kWarpgroupThreads;
      if (Traits::kColumns % kWarpgroupThreads != 0 && column >= Traits::kColumns) continue;
      float const bias = output && p.saves ? 0.0f : device::to_float(bias_[i]);
      values.linear[column] = {scale[i], fmaf(bias, scale[i], shift[i])};
      if (slab != nullptr) {
        values.means[column] = group[i].mean;
        values.affine[column] = {group[i].scale, group[i].shift};
      }
      if constexpr (kExtra == Extra::kNormalizesPixels) {
        values.affine[column] = {
            p.norm.weight ? device::float_of_bits(weight_[i], p.norm.dtype) : 1.0f,
            device::float_of_bits(norm_bias_[i], p.norm.dtype)};
      }
    }
  }

  __device__ __forceinline__ void load(Params const& p, Block const& block, int thread, int i) {
    ColumnPlace const at(p, block, thread + i * kWarpgroupThreads);
    if (!at.present || at.channel >= p.own_channels) return;
    if (p.bias != nullptr) bias_[i] = static_cast<T const*>(p.bias)[at.channel];
    if constexpr (kExtra == Extra::kNormalizesPixels) {
      PixelNorm const& n = p.norm;
      if (n.weight != nullptr) weight_[i] = device::load_bits(n.weight, at.channel, n.dtype);
      if (n.bias != nullptr) norm_bias_[i] = device::load_bits(n.bias, at.channel, n.dtype);
    }
  }

  T bias_[kOwn] = {};
  uint32_t weight_[kOwn] = {}, norm_bias_[kOwn] = {};
};

// For a lane's pairs of neighbouring columns from the first of `by_column` on, eight apart:
// body(number, values of both). Some are asked for before the first is used, and no more: of plain
// loads ptxas hoists all that it likes, and spills 280 bytes where pixels are normalised in TF32.
template <int kPairs, int kMost = 4, class Body>
__device__ __forceinline__ void for_each_pair(Consumer const& self, float2 const* by_column,
                                              Body const& body) {
  constexpr int kTogether = std::gcd(kPairs, kMost);
  uint32_t const own = device::shared_address(by_column + self.lane % 4 * 2);
#pragma unroll
  for (int first = 0; first < kPairs; first += kTogether) {
    float4 values[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      values[i] = device::load_quad(own + (first + i) * 8 * sizeof(float2));
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kTogether; ++i) body(first + i, values[i]);
  }
}

// by_column: scale and shift.
template <class Traits>
__device__ __forceinline__ void scale_and_shift(Consumer const& self, float2 const* by_column,
                                                Sums<Traits>& sums) {
  for_each_pair<Traits::kColumns / 8, Traits::kStationary ? 8 : 4>(
      self, by_column, [&](int j, float4 const& own) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& first = sum_at<Traits>(sums, 4 * j + 2 * half);
          float& second = sum_at<Traits>(sums, 4 * j + 2 * half + 1);
          first = fmaf(first, own.x, own.y);
          second = fmaf(second, own.z, own.w);
        }
      });
}

template <class Traits>
__device__ __forceinline__ void normalize_groups(Consumer const& self,
                                                 ColumnValues<Traits> const& values,
                                                 Sums<Traits>& sums) {
#pragma unroll
  for (int j = 0; j < Traits::kColumns / 8; ++j) {
    float2 const own = reinterpret_cast<float2 const*>(values.means)[j * 4 + self.lane % 4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum_at<Traits>(sums, 4 * j + 2 * half) -= own.x;
      sum_at<Traits>(sums, 4 * j + 2 * half + 1) -= own.y;
    }
  }
  scale_and_shift<Traits>(self, values.affine, sums);
}

}  // namespace fusedconv::conv::sm90::boxes
