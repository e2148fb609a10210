// The kernel; schedule.hpp says what it computes and how.
#pragma once

#include <cstdint>

#include "conv/depthwise/moments.hpp"
#include "conv/depthwise/outputs.hpp"
#include "conv/depthwise/ring.hpp"
#include "conv/depthwise/walk.hpp"

namespace fusedconv::conv::depthwise {

// kBulk: how inputs are staged; kActivates: whether there is an activation, in front or behind.
template <class T, bool kBulk, bool kActivates>
__global__ void __launch_bounds__(kThreads, kResident)
    convolve_twice(__grid_constant__ Params const p) {
  extern __shared__ __align__(128) unsigned char shared[];
  auto* const full = reinterpret_cast<uint64_t*>(shared);
  auto* const moments = reinterpret_cast<PartMoments*>(shared + kBarrierBytes);
  T* const slots = reinterpret_cast<T*>(shared + kBarrierBytes + kMomentsBytes);
  T* const staged = slots + p.slots * p.slot_elements;
  static_assert(kMostSlots * int(sizeof(uint64_t)) <= kBarrierBytes, "a barrier for each slot");

  int const thread = int(threadIdx.x);
  int const rank = int(device::cluster_rank());
  int const instance = int(blockIdx.x) / p.cluster;
  int sample, channel;
  p.channels(sample, channel, instance);
  if (thread < kMostParts * kWarps) moments->warps[thread / kWarps][thread % kWarps] = {};
  if (thread == 0) {
    for (int i = 0; i < p.slots; ++i) device::init_barrier(full + i, 1);
    device::fence_barrier_init();
  }
  __syncthreads();

  Weights const w = Weights::load<T>(p, channel);
  float const bias =
      p.bias != nullptr ? device::to_float(static_cast<T const*>(p.bias)[channel]) : 0.0f;
  Ring<T, kBulk> ring(p, full, slots, instance);
  int const part = rank * p.block_parts;
  int const first = p.part_begin[part], end = p.part_begin[part + p.block_parts];

  ChannelMoments<T, kActivates> taken(p, w, bias, moments, part);
  Walk(p, ring, w, taken).run(first, end);
  taken.leave();
  device::Moments const total = merge(p, moments);
  NormalizedOutputs<T, kActivates> outputs(p, staged, instance, channel, bias,
                                           device::statistics_of(total, p.eps));
  Walk(p, ring, w, outputs).run(first, end);
  outputs.wait();
  device::wait_cluster();
}

}  // namespace fusedconv::conv::depthwise
