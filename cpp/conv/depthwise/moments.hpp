// Moments of what a walk computes, by part, and merged over a cluster.
#pragma once

#include <cstdint>

#include "conv/depthwise/walk.hpp"
#include "cuda/async.hpp"
#include "cuda/cluster.hpp"
#include "cuda/sum.hpp"
#include "groupnorm/moments.hpp"

namespace fusedconv::conv::depthwise {

// What blocks of a cluster leave for each other, and their warps: by part of the block.
struct alignas(16) PartMoments {
  device::Moments warps[kMostParts][kWarps];
  device::Moments parts[kMostParts];
};
static_assert(sizeof(PartMoments) == kMomentsBytes, "what the schedule makes room for");

// Sums about a shift that a warp has in common, an output near those that it meets, for so many
// steps as keep them exact. Without an activation in front, sums of products begin where the shift
// is zero, so that nothing need be taken away.
template <class T, bool kActivates>
class ChannelMoments {
  static constexpr int kMostSteps = 32;

 public:
  // `part` is the block's first of its instance.
  __device__ __forceinline__ ChannelMoments(Params const& p, Weights const& w, float bias,
                                            PartMoments* left, int part)
      : p_(p), middle_(w.of[1][1][1]), bias_(bias), left_(left), first_part_(part) {}

  __device__ __forceinline__ float first() const { return first_; }

  __device__ __forceinline__ void begin_tile(int, int, int first_plane) { next_ = first_plane; }
  __device__ __forceinline__ void begin_step(int z, Lines const& near) {
    if (z != next_) return;
    keep_branch();
    leave();
    begin(z, near[0][0]);
  }

  template <int kOddPlane, int kOddLine>
  __device__ __forceinline__ void line(float (&out)[kRunOutputs], Unit const& unit) {
    if constexpr (kActivates) {
      activate<T>(p_.affine.activation_before, out);
#pragma unroll
      for (int i = 0; i < kRunOutputs; ++i) out[i] -= shift_;
    }
    int const valid = unit.valid[kOddLine];
    if (valid < kRunOutputs - 1) {
      keep_branch();
#pragma unroll
      for (int i = 0; i < kRunOutputs - 1; ++i) out[i] = i < valid ? out[i] : 0.0f;
    }
    out[kRunOutputs - 1] = valid == kRunOutputs ? out[kRunOutputs - 1] : 0.0f;
    sum_ += ((out[0] + out[1]) + (out[2] + out[3])) + ((out[4] + out[5]) + (out[6] + out[7]));
#pragma unroll
    for (int i = 0; i < kRunOutputs; ++i) {
      squares_[i % 2] = fmaf(out[i], out[i], squares_[i % 2]);
    }
    count_ += valid;
  }

  __device__ __forceinline__ void before_barrier() {}
  __device__ __forceinline__ void after_barrier() {}

  // Adds the warp's sums to what it has left of their part.
  __device__ __forceinline__ void leave() {
    device::RelativeMoments own;
    if (count_ > 0) {
      float const offset = sum_ / float(count_);
      float const squares = fmaf(-sum_, offset, squares_[0] + squares_[1]);
      own = {float(count_), offset, device::maximum(squares, 0.0f)};
    }
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) {
      own.merge({__shfl_down_sync(~0u, own.count, step), __shfl_down_sync(~0u, own.offset, step),
                 __shfl_down_sync(~0u, own.m2, step)});
    }
    if (threadIdx.x % kWarp == 0) {
      float2 const origin = two_parts_of_shift();
      left_->warps[part_][threadIdx.x / kWarp].merge(
          {own.count, origin.x, origin.y + own.offset, own.m2});
    }
  }

 private:
  __device__ __forceinline__ bool activates_before() const {
    return kActivates && p_.affine.activation_before != Activation::kIdentity;
  }

  // The shift is an output of the mean of inputs that the warp has, of even outputs, which have one
  // product each: it differs from the mean of all by a few deviations at most.
  __device__ __forceinline__ void begin(int z, float input) {
    if (z == p_.part_begin[first_part_]) part_ = 0;
    if (z == p_.part_begin[first_part_ + part_ + 1]) ++part_;
    next_ = min(z + kMostSteps, p_.part_begin[first_part_ + part_ + 1]);
    float const product = middle_ * (device::warp_total(input) / kWarp);
    first_ = -product;
    if (activates_before()) {
      first_ = bias_;
      shift_ = bias_ + product;
      activate<T>(p_.affine.activation_before, shift_);
    }
    sum_ = squares_[0] = squares_[1] = 0.0f;
    count_ = 0;
  }
  __device__ __forceinline__ float2 two_parts_of_shift() const {
    return activates_before() ? float2{shift_, 0.0f} : device::two_sum(bias_, -first_);
  }

  Params const& p_;
  float middle_, bias_;
  PartMoments* left_;
  int first_part_, part_ = 0;  // of the instance; of the block
  int next_ = 0;               // the plane at which other sums begin
  float first_ = 0.0f, shift_ = 0.0f;
  float sum_ = 0.0f, squares_[2] = {};
  int count_ = 0;
};

// Of the instance, in every thread of its cluster, merged in the order of warps and parts. No block
// may end before all have come to wait_cluster() behind it.
__device__ __forceinline__ device::Moments merge(Params const& p, PartMoments* left) {
  int const thread = int(threadIdx.x);
  __syncthreads();
  if (thread < p.block_parts) {
    device::Moments total;
#pragma unroll 1
    for (int warp = 0; warp < kWarps; ++warp) total.merge(left->warps[thread][warp]);
    left->parts[thread] = total;
  }
  device::sync_cluster();
  device::Moments total;
#pragma unroll 1
  for (int rank = 0; rank < p.cluster; ++rank) {
#pragma unroll 1
    for (int part = 0; part < p.block_parts; ++part) {
      float4 const of_part =
          device::load_of_cluster(device::shared_address(left->parts + part), uint32_t(rank));
      total.merge({of_part.x, of_part.y, of_part.z, of_part.w});
    }
  }
  device::arrive_cluster();
  return total;
}

}  // namespace fusedconv::conv::depthwise
