// A walk over planes of an instance: all outputs in registers, once, for who takes them.
#pragma once

#include <cstdint>

#include "conv/activate.hpp"
#include "conv/depthwise/params.hpp"
#include "conv/depthwise/ring.hpp"
#include "cuda/math.hpp"

namespace fusedconv::conv::depthwise {

// Keeps the compiler from making selections, by all, of what few threads do.
__device__ __forceinline__ void keep_branch() { asm volatile(""); }

// Of a channel, by depth, height and width.
struct Weights {
  float of[kTaps][kTaps][kTaps];

  template <class T>
  __device__ __forceinline__ static Weights load(Params const& p, int channel) {
    T const* const source = static_cast<T const*>(p.weight) + channel * p.source.stride_c;
    Weights result;
#pragma unroll
    for (int z = 0; z < kTaps; ++z) {
#pragma unroll
      for (int y = 0; y < kTaps; ++y) {
#pragma unroll
        for (int x = 0; x < kTaps; ++x) {
          result.of[z][y][x] = device::to_float(
              source[z * p.source.stride_t + y * p.source.stride_r + x * p.source.stride_s]);
        }
      }
    }
    return result;
  }
};

// Even outputs have one tap along an axis, of the first input; odd ones have the last tap of that
// and the first of the second.
__device__ __forceinline__ constexpr int taps_of(int odd) { return 1 + odd; }
__device__ __forceinline__ constexpr int tap_of(int odd, int input) {
  return odd ? (input == 0 ? 2 : 0) : 1;
}

// Outputs of a run in a line of either parity, of a plane of either: sums that begin at `first`.
template <int kOddPlane, int kOddLine>
__device__ __forceinline__ void multiply(Weights const& w, Lines const& near, Lines const& far,
                                         float first, float (&out)[kRunOutputs]) {
#pragma unroll
  for (int i = 0; i < kRunOutputs; ++i) out[i] = first;
#pragma unroll
  for (int z = 0; z < taps_of(kOddPlane); ++z) {
#pragma unroll
    for (int y = 0; y < taps_of(kOddLine); ++y) {
      float const(&taps)[kTaps] = w.of[tap_of(kOddPlane, z)][tap_of(kOddLine, y)];
      Line const& in = z == 0 ? near[y] : far[y];
#pragma unroll
      for (int i = 0; i < kRun; ++i) {
        out[2 * i] = fmaf(taps[1], in[i], out[2 * i]);
        out[2 * i + 1] = fmaf(taps[2], in[i], out[2 * i + 1]);
        out[2 * i + 1] = fmaf(taps[0], in[i + 1], out[2 * i + 1]);
      }
    }
  }
}

// Planes `first` to `end` of the input. A sink has begin_tile(first line, lines, first plane);
// begin_step(z, the unit's lines of plane z); first(), at which sums of products begin;
// line<odd plane, odd line>(outputs, unit), which may change them; before_barrier() and
// after_barrier(), of a step's end.
template <class Inputs, class Sink>
class Walk {
 public:
  __device__ __forceinline__ Walk(Params const& p, Inputs& ring, Weights const& w, Sink& sink)
      : p_(p), ring_(ring), w_(w), sink_(sink) {}

  __device__ __forceinline__ void run(int first, int end) {
#pragma unroll 1
    for (int tile = 0; tile < p_.tiles; ++tile) {
      int const first_line = tile * p_.lines;
      int const lines = min(p_.lines, p_.input_extent[1] - first_line);
      walk_tile(first_line, lines, first, end);
    }
  }

 private:
  __device__ __forceinline__ void walk_tile(int first_line, int lines, int first, int end) {
    Unit const unit(p_, first_line, lines);
    ring_.start(first_line, lines, first, end);
    sink_.begin_tile(first_line, lines, first);
    Lines even, odd;
    ring_.read(unit, even);
#pragma unroll 1
    for (int z = first;;) {
      step(unit, z, even, odd);
      if (++z == end) break;
      step(unit, z, odd, even);
      if (++z == end) break;
    }
  }

  // Two copies of it save moving the second plane's lines to where the first's were.
  __device__ __forceinline__ void step(Unit const& unit, int z, Lines const& near, Lines& far) {
    ring_.read(unit, far);
    sink_.begin_step(z, near);
    line<0, 0>(unit, near, far);
    line<0, 1>(unit, near, far);
    if (kStride * z + 1 < p_.output_extent[0]) {
      line<1, 0>(unit, near, far);
      line<1, 1>(unit, near, far);
    }
    sink_.before_barrier();
    __syncthreads();
    sink_.after_barrier();
    ring_.issue();
  }

  template <int kOddPlane, int kOddLine>
  __device__ __forceinline__ void line(Unit const& unit, Lines const& near, Lines const& far) {
    float out[kRunOutputs];
    multiply<kOddPlane, kOddLine>(w_, near, far, sink_.first(), out);
    sink_.template line<kOddPlane, kOddLine>(out, unit);
  }

  Params const& p_;
  Inputs& ring_;
  Weights const& w_;
  Sink& sink_;
};

}  // namespace fusedconv::conv::depthwise
