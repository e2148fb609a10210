// What a thread computes at once, channels first.
#pragma once

#include "conv/direct/filter_rows.hpp"
#include "conv/direct/params.hpp"
#include "conv/direct/team.hpp"

namespace fusedconv::conv::direct {

// S: a Shape.
template <class S>
struct Unit {
  int z, y, x;  // the first output
  Phase deep, high, along;
  float const* row;  // the window of the first row, for the first taps along depth and height
  float const* weights;

  // index: of a team's units. Those of a phase are neighbours: they have as many taps. Among these,
  // runs of a line are neighbours where outputs go to memory from registers. Where they are staged
  // lines are, which lie in different banks, and warps have either whole runs or last ones.
  template <class T>
  __device__ __forceinline__ Unit(Params const& p, Team<T> const& team, int index) {
    int rest, run, group, depth, residue_d, residue_h;
    if (S::kGeneralTaps || p.stores_runs) {
      p.runs(rest, run, index);
      p.row_groups(rest, group, rest);
      p.tile_d(rest, depth, rest);
    } else {
      p.row_groups(rest, group, index);
      p.tile_d(rest, depth, rest);
      p.runs(rest, run, rest);
    }
    p.phases_h(residue_d, residue_h, rest);
    // There and back: a thread's next unit then has few taps where this one has many.
    if (residue_d % 2 != 0) residue_h = p.phases_h.divisor - 1 - residue_h;
    Place const& place = team.place;
    z = (place.origin[0] + depth) * p.axes[0].problem.stride + residue_d;
    y = (place.origin[1] + group) * p.axes[1].problem.stride + residue_h;
    x = place.origin[2] + run * S::kRun;
    int column = run * (S::kRun / S::kAlong.stride);
    if constexpr (S::kGeneralTaps) {
      deep = phase_of(p, 0, residue_d);
      high = phase_of(p, 1, residue_h);
      int residue_w;
      p.stride_w(column, residue_w, x);
      column -= p.stride_w.div(place.origin[2]) + p.before[2];
      along = phase_of(p, 2, residue_w);
    } else {
      deep = p.first_phases[0][residue_d];
      high = p.first_phases[1][residue_h];
    }
    int const at_depth = depth + deep.shift - p.before[0];
    int const at_height = group + high.shift - p.before[1];
    row = team.box + at_depth * p.box_plane + at_height * p.box[2] + column;
    weights = team.weights + deep.first_tap * p.weight_plane + high.first_tap * p.weight_row;
  }

  __device__ __forceinline__ bool inside(Params const& p, int end_x) const {
    return z < p.axes[0].problem.output && y < p.axes[1].problem.output && x < end_x;
  }

  // Where the first output is staged, counted from the tile's first.
  template <class T>
  __device__ __forceinline__ int staged(Params const& p, Team<T> const& team) const {
    Place const& place = team.place;
    return (z - place.origin[0] * p.axes[0].problem.stride) * p.staged_plane +
           (y - place.origin[1] * p.axes[1].problem.stride) * p.staged_line + x - place.origin[2];
  }

  // Adds the products of all taps with output channels from k on.
  template <class T>
  __device__ __forceinline__ void add_taps(Params const& p, typename S::Values& values,
                                           int k) const {
    float const* of_tap = row;
    float const* weights_of_tap = weights + k * p.kernel_w.divisor;
#pragma unroll 1
    for (int j = 0; j < deep.taps; ++j) {
      float const* of_channel = of_tap;
      float const* weights_of_channel = weights_of_tap;
#pragma unroll 1
      for (int c = 0; c < p.channels; ++c) {
        float const* from = of_channel;
        float const* by = weights_of_channel;
#pragma unroll 1
        for (int i = 0; i < high.taps; ++i) {
          if constexpr (S::kGeneralTaps) {
            add_filter_row<S, T>(p, values, from, by, along);
          } else {
            add_filter_row<S, T>(p, values, from, by);
          }
          from -= p.tap_rows;
          by += p.tap_weight_rows;
        }
        of_channel += p.box_channel;
        weights_of_channel += p.weight_channel;
      }
      of_tap -= p.tap_planes;
      weights_of_tap += p.tap_weight_planes;
    }
  }
};

}  // namespace fusedconv::conv::direct
