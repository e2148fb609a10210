// The input under a tile in shared memory, channels first.
#pragma once

#include <cstdint>

#include "conv/direct/params.hpp"
#include "conv/direct/team.hpp"
#include "cuda/async.hpp"
#include "cuda/math.hpp"

namespace fusedconv::conv::direct {

// Four floats to shared memory, by one access: the compiler splits some that it could keep whole.
__device__ __forceinline__ void store_quad(uint32_t address, float const (&values)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(values[0]),
               "f"(values[1]), "f"(values[2]), "f"(values[3])
               : "memory");
}

// The input under the tile, with zeros outside: [channel, depth, height, width]. A thread has one
// quad of columns of every few lines (of a box wider than the team, several quads of every line),
// and loads some before it stores others.
template <class T>
class BoxLoader {
  static constexpr int kQuads = 6;
  using Quad = device::Pack<T, 4>;

 public:
  __device__ __forceinline__ BoxLoader(Params const& p, Team<T> const& team,
                                       int const (&origin)[kMaxAxes])
      : lead_(p.vector_loads ? origin[2] & 3 : 0), lines_(p.channels * p.box[0] * p.box[1]) {
    p.team_quads(first_line_, quad_, team.thread);
    plane_ = int64_t(p.axes[0].problem.input) * p.axes[1].problem.input * p.axes[2].problem.input;
    input_ = static_cast<T const*>(p.input) +
             (int64_t(team.place.sample) * p.groups + team.group) * p.channels * plane_;
    if (first_line_ < p.team_lines) load(p, origin);
  }

  __device__ __forceinline__ void finish(Params const& p, Team<T> const& team,
                                         int const (&origin)[kMaxAxes]) {
    if (first_line_ >= p.team_lines) return;
    while (store(p, team)) load(p, origin);
  }

 private:
  // A thread's item: its line and its quad, false behind the last.
  __device__ __forceinline__ bool locate(Params const& p, int item, int& line, int& quad) const {
    line = item;
    quad = quad_;
    if (p.quad_passes.divisor > 1) {
      int pass;
      p.quad_passes(line, pass, item);
      quad += pass * p.team_quads.divisor;
    }
    line = first_line_ + line * p.team_lines;
    return line < lines_;
  }

  __device__ __forceinline__ void load(Params const& p, int const (&origin)[kMaxAxes]) {
    int const d = p.axes[0].problem.input, h = p.axes[1].problem.input;
    int const w = p.axes[2].problem.input;
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      values_[i] = Quad();
      int line, quad, y, c = 0;
      if (!locate(p, item_ + i, line, quad)) continue;
      p.box_h(line, y, line);
      if (p.channels > 1) p.box_d(c, line, line);
      int const z = line + origin[0], x = origin[2] - lead_ + 4 * quad;
      y += origin[1];
      if (unsigned(z) >= unsigned(d) || unsigned(y) >= unsigned(h)) continue;
      T const* const source = input_ + c * plane_ + (z * h + y) * w + x;
      if (p.vector_loads) {
        if (unsigned(x) < unsigned(w)) values_[i] = Quad::load(source);
      } else {
#pragma unroll
        for (int v = 0; v < 4; ++v) {
          if (unsigned(x + v) < unsigned(w)) values_[i].values[v] = source[v];
        }
      }
    }
  }

  // Whether there are more.
  __device__ __forceinline__ bool store(Params const& p, Team<T> const& team) {
    int line, quad;
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      if (!locate(p, item_ + i, line, quad)) return false;
      int const column = 4 * quad - lead_;
      float* const target = team.box + line * p.box[2] + column;
      float values[4];
#pragma unroll
      for (int v = 0; v < 4; ++v) values[v] = device::to_float(values_[i].values[v]);
      if (lead_ == 0 && column < p.box[2]) {
        store_quad(device::shared_address(target), values);
      } else {
#pragma unroll
        for (int v = 0; v < 4; ++v) {
          if (unsigned(column + v) < unsigned(p.box[2])) target[v] = values[v];
        }
      }
    }
    item_ += kQuads;
    return locate(p, item_, line, quad);
  }

  int lead_, lines_, first_line_, quad_, item_ = 0;
  int64_t plane_;  // of a channel; a pixel's number in it fits an int
  T const* input_;
  Quad values_[kQuads];
};

}  // namespace fusedconv::conv::direct
