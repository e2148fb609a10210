// The convolution channels first.
#pragma once

#include <cstdint>

#include "conv/direct/box.hpp"
#include "conv/direct/channel_moments.hpp"
#include "conv/direct/epilogue.hpp"
#include "conv/direct/params.hpp"
#include "conv/direct/segments.hpp"
#include "conv/direct/team.hpp"
#include "conv/direct/unit.hpp"

namespace fusedconv::conv::direct {

// What becomes of a thread's outputs, of output channels k to k + S::kChannels of the team.
template <class S, class T>
class Outputs {
 public:
  __device__ __forceinline__ Outputs(Params const& p, Team<T> const& team, int k)
      : p_(p),
        team_(team),
        k_(k),
        present_(min(S::kChannels, team.channels_from(p, k))),
        segments_(p, team, team.channel(p, k)) {}

  __device__ __forceinline__ int present() const { return present_; }
  __device__ __forceinline__ int end_y() const {
    return min((team_.place.origin[1] + p_.tile[1]) * p_.axes[1].problem.stride,
               p_.axes[1].problem.output);
  }
  __device__ __forceinline__ int end_x() const {
    return min(team_.place.origin[2] + p_.tile[2], p_.axes[2].problem.output);
  }
  __device__ __forceinline__ Segments<T> const& segments() const { return segments_; }
  __device__ __forceinline__ ChannelMoments<S::kChannels> const& moments() const {
    return moments_;
  }

  // What sums begin with. Sums in float32 take the bias last: it may be far larger than they are.
  __device__ __forceinline__ void begin(typename S::Values& values) const {
    for_biases(
        [&](float& value, float bias) {
          value = kSumsRows<T> ? 0.0f : bias;
          // Or the compiler would set them twice, for no taps and for some.
          asm volatile("" : "+f"(value));
        },
        values);
  }

  __device__ __forceinline__ void finish(Unit<S> const& unit, typename S::Values& values) {
    if constexpr (kSumsRows<T>) {
      for_biases([](float& value, float bias) { value += bias; }, values);
    }
    if (!p_.activates_output) store(unit, values);
    if (p_.activates_output || p_.partials != nullptr) activate<T>(p_.activation, values);
    if (p_.activates_output) store(unit, values);
    if (p_.partials == nullptr) return;
    for_rows(unit, [&](int i, int, int, int count) {
      moments_.template add<S::kRun>(count,
                                     [&](int k) -> auto& { return values[k * S::kRows + i]; });
    });
  }

 private:
  template <class Body>
  __device__ __forceinline__ void for_biases(Body const& body, typename S::Values& values) const {
    auto const biases = device::Pack<float, S::kChannels>::load(team_.bias + k_);
#pragma unroll
    for (int i = 0; i < S::kChannels * S::kRows; ++i) {
#pragma unroll
      for (float& value : values[i]) body(value, biases.values[i / S::kRows]);
    }
  }
  // Calls body(row, y, x, outputs that there are) for a thread's rows that have some.
  template <class Body>
  __device__ __forceinline__ void for_rows(Unit<S> const& unit, Body const& body) const {
    int const last_y = end_y(), last_x = end_x();
#pragma unroll
    for (int i = 0; i < S::kRows; ++i) {
      int const y = unit.y + i * p_.row_height, x = unit.x + i * p_.row_width;
      if (y < last_y && x < last_x) body(i, y, x, min(S::kRun, last_x - x));
    }
  }

  // Leaves the values as they are stored.
  __device__ __forceinline__ void store(Unit<S> const& unit, typename S::Values& values) const {
    if constexpr (!S::kGeneralTaps) {
      if (p_.stores_runs) return store_runs(unit, values);
    }
    stage(unit, values);
  }
  __device__ __forceinline__ void store_runs(Unit<S> const& unit,
                                             typename S::Values& values) const {
    Place const& place = team_.place;
    int const z = unit.z - place.origin[0] * p_.axes[0].problem.stride;
    int const first_y = place.origin[1] * p_.axes[1].problem.stride;
    for_rows(unit, [&](int i, int y, int x, int) {
      T* const target =
          segments_.target +
          (int64_t(z) * p_.axes[1].problem.output + y - first_y) * p_.axes[2].problem.output + x -
          place.origin[2];
#pragma unroll
      for (int k = 0; k < S::kChannels; ++k) {
        StoredRow<T, S::kRun> const row(values[k * S::kRows + i]);
        if (k < present_) row.store(target + k * p_.output_pixels);
        row.values(values[k * S::kRows + i]);
      }
    });
  }
  __device__ __forceinline__ void stage(Unit<S> const& unit, typename S::Values& values) const {
    int const first = segments_.first + unit.staged(p_, team_);
    for_rows(unit, [&](int i, int, int, int count) {
      auto const stage_each = [&](auto const& stage_row) {
#pragma unroll
        for (int k = 0; k < S::kChannels; ++k) {
          StoredRow<T, S::kRun> const row(values[k * S::kRows + i]);
          stage_row(row, first + i * p_.staged_row + k * p_.staged_channel);
          row.values(values[k * S::kRows + i]);
        }
      };
      if (count == S::kRun) {
        stage_each([&](auto const& row, int at) { row.stage(team_.staged, at); });
      } else {
        stage_each([&](auto const& row, int at) { row.stage_first(count, team_.staged + at); });
      }
    });
  }

  Params const& p_;
  Team<T> const& team_;
  int k_, present_;
  Segments<T> segments_;
  ChannelMoments<S::kChannels> moments_;
};

// kTaps: index into kRunTaps, or kGeneral. kChannels: output channels of a thread at once.
template <class T, int kTaps, int kChannels>
__global__ void __launch_bounds__(kThreads, blocks_of(kChannels))
    convolve_planes(__grid_constant__ Params const p, int team_bytes) {
  extern __shared__ __align__(16) unsigned char shared[];
  using S = Shape<T, kTaps, kChannels>;
  WarpMoments<kChannels> const by_warp(p, shared);
  int const number = int(threadIdx.x) / p.team_threads;
  Team<T> const team(p, shared + kMomentsBytes, number, team_bytes,
                     int(blockIdx.x) * (kThreads / p.team_threads) + number);
  if (team.active) {
    Place const& place = team.place;
    int const origin[kMaxAxes] = {place.origin[0] + p.before[0], place.origin[1] + p.before[1],
                                  p.stride_w.div(place.origin[2]) + p.before[2]};
    BoxLoader<T> loader(p, team, origin);
    stage_weights(p, team);
    loader.finish(p, team, origin);
  }
  __syncthreads();
  for (int k = 0; k < p.block_channels; k += kChannels) {
    Outputs<S, T> outputs(p, team, k);
    int const units = outputs.present() > 0 ? p.units : 0;
#pragma unroll 1
    for (int index = team.thread; index < units; index += p.team_threads) {
      Unit<S> const unit(p, team, index);
      if (!unit.inside(p, outputs.end_x())) continue;
      typename S::Values values;
      outputs.begin(values);
      unit.template add_taps<T>(p, values, k);
      outputs.finish(unit, values);
    }
    int const group = k / kChannels;
    if (p.partials != nullptr) by_warp.leave(group, outputs.moments());
    if (!p.stores_runs) finish_staging();
    if (!p.stores_runs || p.partials != nullptr) __syncthreads();
    if (!p.stores_runs) store_segments(p, team, outputs.segments(), outputs.present());
    if (p.partials != nullptr) {
      by_warp.merge(p, team, group, [&](int i) -> groupnorm::Partial* {
        if (i >= outputs.present()) return nullptr;
        int64_t const slot = team.place.sample * p.slots + team.place.tile;
        return p.partials + slot * p.groups * p.output_channels + team.channel(p, k + i);
      });
    }
    if (!p.stores_runs) {
      wait_for_stores();
      __syncthreads();
    }
  }
}

}  // namespace fusedconv::conv::direct
