// Inputs on their way to registers: planes of a tile in a ring of slots in shared memory.
#pragma once

#include <cstdint>

#include "conv/depthwise/params.hpp"
#include "cuda/async.hpp"
#include "cuda/math.hpp"

namespace fusedconv::conv::depthwise {

// A run of a line, and the input behind it.
using Line = float[kRun + 1];
// Lines y and y + 1.
using Lines = float[2][kRun + 1];

// A thread's part of a tile. Threads without one read the tile's first run and have no outputs.
struct Unit {
  int source, target;  // elements from the begin of staged inputs and of a plane's outputs
  bool has_next;       // an input behind the run
  int valid[2];        // outputs of the two lines

  __device__ __forceinline__ Unit(Params const& p, int first_line, int lines) {
    int line, run;
    p.runs(line, run, int(threadIdx.x));
    bool const active = line < lines;
    if (!active) line = run = 0;
    int const x = run * kRun, y = first_line + line;
    int const width = p.output_extent[2];
    source = line * p.pitch.divisor + x;
    target = kStride * (line * width + x);
    has_next = run + 1 < p.runs.divisor;
    valid[0] = active ? min(kRunOutputs, width - kStride * x) : 0;
    valid[1] = kStride * y + 1 < p.output_extent[1] ? valid[0] : 0;
  }
};

// Planes of a tile in the order in which they are read. Every plane is issued once and read once,
// over tiles and walks too, so that the parities of barriers never get out of step. kBulk: lines
// are multiples of 16 bytes, and a tile's lines of a plane are one copy.
template <class T, bool kBulk>
class Ring {
 public:
  __device__ __forceinline__ Ring(Params const& p, uint64_t* full, T* slots, int instance)
      : p_(p), full_(full), slots_(slots) {
    plane_elements_ = int64_t(p.input_extent[1]) * p.input_extent[2];
    instance_ =
        static_cast<T const*>(p.input) + int64_t(instance) * p.input_extent[0] * plane_elements_;
  }

  // Planes `plane` to `last`; the one behind the input's last is zeros. All threads have read what
  // was in the slots before.
  __device__ __forceinline__ void start(int first_line, int lines, int plane, int last) {
    source_ = instance_ + plane * plane_elements_ + int64_t(first_line) * p_.input_extent[2];
    lines_ = min(lines + 1, p_.input_extent[1] - first_line);
    left_ = last - plane + 1;
    zeros_ = last - p_.input_extent[0] + 1;
    if (lines_ == lines) {
      clear_line(lines);
      device::fence_async_proxy();  // another tile's copies may write there
    }
#pragma unroll 1
    for (int i = 0; i < p_.slots; ++i) issue();
    __syncthreads();
  }

  // All threads have read what was in the slot before.
  __device__ __forceinline__ void issue() {
    if (left_ <= 0) return;
    T* const target = slots_ + write_slot_ * p_.slot_elements;
    if (left_ <= zeros_) {
      clear_plane(target);
      if (kBulk && threadIdx.x == 0) device::arrive(full_ + write_slot_);
    } else if constexpr (!kBulk) {
      stage(target);
    } else if (threadIdx.x == 0) {
      uint32_t const bytes = uint32_t(lines_ * p_.input_extent[2]) * uint32_t(sizeof(T));
      uint64_t* const barrier = full_ + write_slot_;
      device::arrive_and_expect(barrier, bytes);
      device::bulk_load(device::shared_address(target), source_, bytes, barrier);
    }
    source_ += plane_elements_;
    --left_;
    write_slot_ = write_slot_ + 1 == p_.slots ? 0 : write_slot_ + 1;
  }

  // The next plane's two lines of the unit.
  __device__ __forceinline__ void read(Unit const& unit, Lines& lines) {
    if constexpr (kBulk) device::wait(full_ + cursor_.stage, cursor_.parity);
    T const* const source = slots_ + cursor_.stage * p_.slot_elements + unit.source;
    load_line(source, unit.has_next, lines[0]);
    load_line(source + p_.pitch.divisor, unit.has_next, lines[1]);
    cursor_.advance(p_.slots);
  }

 private:
  __device__ __forceinline__ static void load_line(T const* source, bool has_next, Line& line) {
    float run[kRun];
    device::Pack<T, kRun>::load(source).to_floats(run);
#pragma unroll
    for (int i = 0; i < kRun; ++i) line[i] = run[i];
    line[kRun] = has_next ? device::to_float(source[kRun]) : 0.0f;
  }

  __device__ __forceinline__ void clear_plane(T* target) const {
#pragma unroll 1
    for (int i = int(threadIdx.x); i < p_.slot_elements; i += kThreads) {
      target[i] = device::from_float<T>(0.0f);
    }
    if (kBulk) device::fence_async_proxy();  // the next walk's copies write there
  }

  // The line behind a plane's last one.
  __device__ __forceinline__ void clear_line(int line) const {
    int const pitch = p_.pitch.divisor;
    for (int i = int(threadIdx.x); i < p_.slots * pitch; i += kThreads) {
      int slot, x;
      p_.pitch(slot, x, i);
      slots_[slot * p_.slot_elements + line * pitch + x] = device::from_float<T>(0.0f);
    }
  }

  // Lines that are not whole vectors, with zeros up to a whole number of runs.
  __device__ __forceinline__ void stage(T* target) const {
    int const width = p_.input_extent[2];
#pragma unroll 1
    for (int i = int(threadIdx.x); i < lines_ * p_.pitch.divisor; i += kThreads) {
      int line, x;
      p_.pitch(line, x, i);
      target[i] = x < width ? source_[line * width + x] : device::from_float<T>(0.0f);
    }
  }

  Params const& p_;
  uint64_t* full_;
  T* slots_;
  T const* instance_;
  T const* source_ = nullptr;
  int64_t plane_elements_;
  int lines_ = 0, left_ = 0, zeros_ = 0;
  int write_slot_ = 0;
  device::RingCursor cursor_;
};

}  // namespace fusedconv::conv::depthwise
