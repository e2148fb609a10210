// What a walk computes, normalised, to memory.
//
// Lines of outputs are odd in length or begin anywhere. So a tile's two planes of a step are staged
// in shared memory at the offset from 16 bytes that they have in memory, and leave it by one bulk
// copy each, and by few elements at the ends.
#pragma once

#include <cstdint>

#include "conv/depthwise/walk.hpp"
#include "cuda/async.hpp"
#include "cuda/math.hpp"
#include "cuda/pair.hpp"
#include "cuda/store_shared.hpp"
#include "groupnorm/moments.hpp"

namespace fusedconv::conv::depthwise {

template <class T, bool kActivates>
class NormalizedOutputs {
  static constexpr int kVector = 16 / int(sizeof(T));
  // The first of the warps that store a plane each.
  static constexpr int kFirstStorer = 2;

 public:
  __device__ __forceinline__ NormalizedOutputs(Params const& p, T* staged, int instance,
                                               int channel, float bias,
                                               groupnorm::Statistics const& statistics)
      : p_(p),
        staged_(staged),
        address_(device::shared_address(staged)),
        plane_elements_(p.output_extent[1] * p.output_extent[2]) {
    instance_ =
        static_cast<T*>(p.output) + int64_t(instance) * p.output_extent[0] * plane_elements_;
    scale_ = statistics.rstd * groupnorm::weight_of(p.affine, channel);
    first_ = bias;
    float rest = -statistics.low;
    if (kActivates && p.affine.activation_before != Activation::kIdentity) {
      mean_ = statistics.mean;
    } else {
      // Sums of products begin at the bias less the mean; what a float of that lacks goes to the
      // shift.
      float2 const difference = device::two_sum(bias, -statistics.mean);
      float2 const origin = device::two_sum(difference.x, difference.y + rest);
      first_ = origin.x;
      rest = origin.y;
    }
    shift_ = fmaf(rest, scale_, groupnorm::bias_of(p.affine, channel));
  }

  __device__ __forceinline__ float first() const { return first_; }

  __device__ __forceinline__ void begin_tile(int first_line, int lines, int first_plane) {
    int const width = p_.output_extent[2], line = kStride * first_line;
    // begin_step() goes on by two planes.
    target_ =
        instance_ + (int64_t(first_plane) - 1) * kPlanes * plane_elements_ + int64_t(line) * width;
    length_ = min(kStride * lines, p_.output_extent[1] - line) * width;
  }
  __device__ __forceinline__ void begin_step(int z, Lines const&) {
    int const next = buffer_ + kPlanes * p_.span_elements;
    buffer_ = next == p_.buffers * kPlanes * p_.span_elements ? 0 : next;
    planes_ = min(kPlanes, p_.output_extent[0] - kPlanes * z);
    target_ += kPlanes * int64_t(plane_elements_);
    lead_ =
        int(uint32_t(reinterpret_cast<uintptr_t>(target_)) / uint32_t(sizeof(T))) & (kVector - 1);
  }

  template <int kOddPlane, int kOddLine>
  __device__ __forceinline__ void line(float (&out)[kRunOutputs], Unit const& unit) {
    finish(out);
    // From the begin of the plane's copy, which is aligned. Units begin at even elements of it.
    int const offset = lead_of(kOddPlane) + kOddLine * p_.output_extent[2];
    uint32_t const target =
        address_ + uint32_t(copy_of(kOddPlane) + offset + unit.target) * uint32_t(sizeof(T));
    int const valid = unit.valid[kOddLine];
    if (valid >= kRunOutputs - 1) {
      if (offset % 2 == 0) {
        stage<0>(target, out, valid == kRunOutputs);
      } else {
        stage<1>(target, out, valid == kRunOutputs);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kRunOutputs - 2; ++i) {
        if (i < valid) put(target, i, out);
      }
    }
  }

  // The copies of the step before, or of the one before that, have had this step's time. Behind the
  // barrier all know that the next step's buffer is free.
  __device__ __forceinline__ void before_barrier() {
    if (stores()) {
      if (p_.buffers == kMostBuffers) {
        device::wait_stores_read<kMostBuffers - kLeastBuffers>();
      } else {
        device::wait_stores_read();
      }
    }
    device::fence_async_proxy();
  }
  // One group of copies a step, be there none: they are counted.
  __device__ __forceinline__ void after_barrier() {
    if (!stores()) return;
    if (own_plane() < planes_) {
      store(own_plane(), int(threadIdx.x) % kWarp);
    } else {
      device::commit_stores();
    }
  }
  // Shared memory must stay until it has been read.
  __device__ __forceinline__ void wait() {
    if (stores()) device::wait_stores_read();
  }

 private:
  // Of the warps that store, which plane of a step.
  __device__ __forceinline__ static int own_plane() {
    return int(threadIdx.x) / kWarp - kFirstStorer;
  }
  __device__ __forceinline__ static bool stores() {
    return own_plane() >= 0 && own_plane() < kPlanes;
  }
  // Elements behind a multiple of 16 bytes at which a plane's outputs begin.
  __device__ __forceinline__ int lead_of(int plane) const {
    return (lead_ + plane * plane_elements_) & (kVector - 1);
  }
  __device__ __forceinline__ int copy_of(int plane) const {
    return buffer_ + plane * p_.span_elements;
  }

  __device__ __forceinline__ void finish(float (&out)[kRunOutputs]) const {
    if constexpr (kActivates) {
      activate<T>(p_.affine.activation_before, out);
#pragma unroll
      for (int i = 0; i < kRunOutputs; ++i) out[i] = fmaf(out[i] - mean_, scale_, shift_);
      activate<T>(p_.affine.activation_after, out);
    }
  }
  // Without activations values are scaled where they are stored, for the registers of a pair to be
  // neighbours in either case.
  __device__ __forceinline__ float finished(float value) const {
    return kActivates ? value : fmaf(value, scale_, shift_);
  }

  __device__ __forceinline__ void put(uint32_t target, int i,
                                      float const (&out)[kRunOutputs]) const {
    target += uint32_t(i) * uint32_t(sizeof(T));
    if constexpr (sizeof(T) == 2) {
      device::store_shared(target, uint16_t(device::from_pair<T>(finished(out[i]), 0.0f)));
    } else {
      device::store_shared(target, finished(out[i]));
    }
  }
  __device__ __forceinline__ void put_pair(uint32_t target, int i,
                                           float const (&out)[kRunOutputs]) const {
    target += uint32_t(i) * uint32_t(sizeof(T));
    if constexpr (sizeof(T) == 2) {
      device::store_shared(target, device::from_pair<T>(finished(out[i]), finished(out[i + 1])));
    } else {
      device::store_shared(target, finished(out[i]), finished(out[i + 1]));
    }
  }

  // Pairs that are aligned: those of even and odd outputs, or of odd and even ones between single
  // ones at the ends. The last output may be beyond the line.
  template <int kOdd>
  __device__ __forceinline__ void stage(uint32_t target, float const (&out)[kRunOutputs],
                                        bool whole) const {
    keep_branch();
    if constexpr (kOdd) put(target, 0, out);
#pragma unroll
    for (int i = kOdd; i < kRunOutputs - 2; i += 2) put_pair(target, i, out);
    constexpr int kLast = kRunOutputs - 1;
    if constexpr (kOdd) {
      if (whole) put(target, kLast, out);
    } else if (whole) {
      put_pair(target, kLast - 1, out);
    } else {
      put(target, kLast - 1, out);
    }
  }

  // By a warp: whole 16 bytes by one copy, what lies around them by lanes.
  __device__ __forceinline__ void store(int plane, int lane) const {
    int const lead = lead_of(plane), begin = copy_of(plane) + lead;
    T* const target = target_ + plane * plane_elements_;
    int const head = min(-lead & (kVector - 1), length_);
    int const tail = (length_ - head) & (kVector - 1);
    int const middle = length_ - head - tail;
    if (lane == 0 && middle > 0) {
      device::bulk_store(target + head, address_ + uint32_t(begin + head) * uint32_t(sizeof(T)),
                         uint32_t(middle) * uint32_t(sizeof(T)));
    } else {
      device::commit_stores();
    }
    int const i = lane < kVector ? lane : length_ - tail + lane - kVector;
    if (lane < kVector ? lane < head : i < length_) target[i] = staged_[begin + i];
  }

  Params const& p_;
  T* staged_;
  uint32_t address_;
  int plane_elements_;
  T* instance_;
  T* target_ = nullptr;
  int length_ = 0, planes_ = 0, lead_ = 0;
  int buffer_ = 0;  // the first element of the current one
  float first_, scale_, shift_, mean_ = 0.0f;
};

}  // namespace fusedconv::conv::depthwise
