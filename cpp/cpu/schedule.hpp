// How the processor's kernels cut tensors up and share the pieces among threads.
#pragma once

#ifdef _OPENMP
#include <omp.h>
#define FUSEDCONV_OMP(directive) _Pragma(#directive)
#else
#define FUSEDCONV_OMP(directive)
#endif

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <type_traits>

#include "cpu/loops.hpp"
#include "fusedconv/groupnorm.hpp"

namespace fusedconv::cpu {

inline constexpr int64_t kPart = 32768;             // elements of a task, about
inline constexpr int64_t kWavePerThread = 1 << 17;  // elements: stay in the second-level cache
inline constexpr int64_t kMinPerThread = 8192;      // below, a thread costs more than it saves

// Uninitialised, aligned so that no vector straddles two cache lines. Over-allocated instead of by
// aligned new, which is slow where little is asked for.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t count)
      : data_(count == 0 ? nullptr : new char[count * sizeof(T) + kAlignment]),
        first_(reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(data_.get()) + kAlignment - 1) &
                                    ~(kAlignment - 1))) {}
  T* get() const { return first_; }
  T& operator[](int64_t index) const { return first_[index]; }

 private:
  static_assert(std::is_trivially_destructible_v<T>);
  static constexpr uintptr_t kAlignment = 64;
  std::unique_ptr<char[]> data_;
  T* first_;
};

// Rows of lanes, over a sample whose channels come last: a pixel's channels, repeated until a row
// is long enough to sum with independent adders and, if possible, made of whole vectors.
struct Rows {
  int64_t lanes, elements_of_part, parts;

  Rows(int64_t channels, int64_t length) {
    constexpr int64_t kVector = 16, kLanes = 4 * kVector, kMaxLanes = 2048;
    constexpr int64_t kMinRows = 64, kMaxRows = 256;  // few partial sums, and none of many terms
    int64_t const repeats = ceil_div(kLanes, channels);
    int64_t const whole = round_up(repeats, kVector / std::gcd(kVector, channels));
    lanes = std::min(length, channels * (channels * whole <= kMaxLanes ? whole : repeats));
    int64_t const rows = ceil_div(length, lanes);
    parts = ceil_div(rows, std::clamp(kPart / lanes, kMinRows, kMaxRows));
    elements_of_part = ceil_div(rows, parts) * lanes;
    parts = ceil_div(length, elements_of_part);
  }
};

// Runs of one channel's pixels: a part is several short planes or a piece of a long one.
struct Planes {
  int64_t planes_of_part, pixels_of_part, pieces, parts;

  Planes(int64_t planes, int64_t pixels) {
    pieces = ceil_div(pixels, kPart);
    pixels_of_part = ceil_div(pixels, pieces);
    planes_of_part = pieces > 1 ? 1 : std::max<int64_t>(1, kPart / pixels);
    parts = ceil_div(planes, planes_of_part) * pieces;
  }

  // Calls body(plane, first pixel, pixels, piece) for each run of the part.
  template <class Body>
  void for_each(int64_t part, int64_t planes, int64_t pixels, Body body) const {
    int64_t const piece = part % pieces;
    int64_t const first = piece * pixels_of_part;
    int64_t const count = std::min(pixels_of_part, pixels - first);
    int64_t const begin = part / pieces * planes_of_part;
    int64_t const end = std::min(planes, begin + planes_of_part);
    for (int64_t plane = begin; plane < end; ++plane) body(plane, first, count, piece);
  }
};

// Units are independent of each other. Each is read in parts, then its parts are merged, then it is
// written in parts. No cut depends on the number of threads, so neither do the bits of the result.
class Schedule {
 public:
  // `shares` has threads share units even where they could take whole ones.
  Schedule(int64_t units, int64_t elements_of_unit, int64_t parts_to_read, int64_t parts_to_write,
           int threads, bool shares = false)
      : units_(units), reads_(parts_to_read), writes_(parts_to_write) {
    threads_ = std::min({static_cast<int64_t>(threads), units * std::max(reads_, writes_),
                         ceil_div(units * elements_of_unit, kMinPerThread)});
    // A unit of one part has nothing to share.
    whole_ = reads_ + writes_ == 1 || threads_ == 1 ||
             (!shares && (units_ % threads_ == 0 || units_ >= 8 * threads_));
    int64_t const wave = threads_ * kWavePerThread / elements_of_unit;
    places_ = whole_ ? threads_ : std::clamp<int64_t>(wave, 1, units_);
  }

  int64_t threads() const { return threads_; }
  // Units in hand at a time; each call gets the place of its unit.
  int64_t places() const { return places_; }

  // Threads take whole units where those divide evenly, else share the parts of a wave of units: so
  // few that what is written was read from cache. The bodies may not throw.
  // read(unit, place, part, thread), merge(unit, place), write(unit, place, part, thread).
  template <class Read, class Merge, class Write>
  void run(Read read, Merge merge, Write write) const {
    auto const work = [&](int64_t thread) {
      if (whole_) {
        FUSEDCONV_OMP(omp for schedule(static))
        for (int64_t unit = 0; unit < units_; ++unit) {
          for (int64_t part = 0; part < reads_; ++part) read(unit, thread, part, thread);
          merge(unit, thread);
          for (int64_t part = 0; part < writes_; ++part) write(unit, thread, part, thread);
        }
        return;
      }
      for (int64_t first = 0; first < units_; first += places_) {
        int64_t const units = std::min(places_, units_ - first);
        FUSEDCONV_OMP(omp for schedule(static))
        for (int64_t task = 0; task < units * reads_; ++task) {
          int64_t const place = task / reads_;
          read(first + place, place, task % reads_, thread);
        }
        FUSEDCONV_OMP(omp for schedule(static))
        for (int64_t place = 0; place < units; ++place) merge(first + place, place);
        FUSEDCONV_OMP(omp for schedule(static))
        for (int64_t task = 0; task < units * writes_; ++task) {
          int64_t const place = task / writes_;
          write(first + place, place, task % writes_, thread);
        }
      }
    };
#ifdef _OPENMP
    // A parallel region costs as much as a small tensor, even of one thread.
    if (threads_ > 1) {
      FUSEDCONV_OMP(omp parallel num_threads(static_cast<int>(threads_)))
      work(omp_get_thread_num());
      return;
    }
#endif
    work(0);
  }

 private:
  int64_t units_, reads_, writes_;
  int64_t threads_, places_;
  bool whole_;  // threads take whole units
};

// Elements of a tensor of run-time dtype, from `offset` on.
inline void const* at(void const* base, DType dtype, int64_t offset) {
  return static_cast<char const*>(base) + offset * size_of(dtype);
}
inline void* at(void* base, DType dtype, int64_t offset) {
  return static_cast<char*>(base) + offset * size_of(dtype);
}

constexpr int index_of(DType dtype) { return static_cast<int>(dtype); }
constexpr int index_of(Activation activation) { return static_cast<int>(activation); }

// What both passes check of a problem; throws InvalidArgument.
void check(GroupNormProblem const& problem, int threads);
// That of two dtypes of 16 bits none is converted to the other.
void check_dtypes(GroupNormProblem const& problem);
// What passes over gradients check of dtypes and layouts.
void check_gradients(GroupNormProblem const& problem, int threads);
// That there is no activation both in front and behind.
void check_one_activation(GroupNormProblem const& problem);
// That a forward pass has an input and an output that it can write; asks for large pages behind a
// new one.
void prepare_output(GroupNormProblem const& problem, GroupNormTensors const& tensors);
constexpr bool is_empty(GroupNormProblem const& problem) {
  return problem.batch == 0 || problem.channels == 0 || problem.pixels == 0;
}

// `count` values of an affine parameter as float32, `otherwise` where there is none.
void read_affine(DType dtype, void const* from, int64_t count, float otherwise, float* to);

}  // namespace fusedconv::cpu
