// GroupNorm for processors. The procedure:
//   1. Cut the tensor into units, contiguous runs with statistics of their own: one (sample, group)
//      when channels come first, one sample with all its groups when channels come last. Cut units
//      into chunks, chunks into blocks that stay in the first-level cache. No cut depends on the
//      number of threads, so neither do the bits of the result.
//   2. Moments of a chunk: a block is widened to float32, activated, and seen as rows of `lanes`
//      elements, the lanes a multiple of the channels. Each lane takes its mean over the rows, then
//      sums deviations and their squares (two passes, the second in cache), and merges into the
//      lane's running (mean, M2) by Chan's formula. At the end lanes merge into groups.
//   3. Moments of a unit: the chunks' moments merge in order.
//   4. Normalise the chunk: apply the affine map to the activated elements, activate, narrow.
// Threads take whole units where those divide evenly, else share the chunks of a wave of units: so
// few that step 4 finds its input in cache.
#include "cpu/group_norm.hpp"

#ifdef _OPENMP
#include <omp.h>
#endif

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <numeric>
#include <optional>
#include <vector>

#include "fusedconv/check.hpp"

#ifdef _OPENMP
#define FUSEDCONV_OMP(directive) _Pragma(#directive)
#else
#define FUSEDCONV_OMP(directive)
#endif

// Inner loops are compiled for several instruction sets, chosen at load time. They must be plain
// functions, and all that they call must inline, or the clones would share baseline code.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    __GNUC__ >= 12
#define FUSEDCONV_CLONES \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FUSEDCONV_CLONES
#endif
#ifdef __clang__
#define FUSEDCONV_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define FUSEDCONV_INDEPENDENT _Pragma("GCC ivdep")
#endif
#define FUSEDCONV_INLINE inline __attribute__((always_inline))

namespace fusedconv::cpu {
namespace {

constexpr int64_t kVector = 16;              // float32 in the widest register
constexpr int64_t kLanes = 4 * kVector;      // at least: independent sums hide the adder's latency
constexpr int64_t kMaxLanes = 2048;          // when channels repeat to fill whole vectors
constexpr int64_t kBlock = 8192;             // 32 KiB of float32
constexpr int64_t kBlockRows = 16;           // at least: Chan's merge is paid once per block
constexpr int64_t kChunk = 16384;            // a task
constexpr int64_t kChunkRows = 32;           // at least, so that partial moments stay few
constexpr int64_t kWavePerThread = 1 << 17;  // input and output of a thread's share: about 1 MiB
constexpr int64_t kMaxKept = 1 << 21;        // 8 MiB of float32 for each thread
constexpr int64_t kMinPerThread = 8192;      // below, starting a thread costs more than it saves

// ---- Scalar functions ----

// condition ? a : b. Written with ?:, a computation sinks into the arm that needs it and becomes a
// branch, as floating-point arithmetic may trap: then only AVX-512 vectorises.
FUSEDCONV_INLINE uint32_t select(bool condition, uint32_t a, uint32_t b) {
  uint32_t const mask = 0u - static_cast<uint32_t>(condition);
  return (a & mask) | (b & ~mask);
}

FUSEDCONV_INLINE float select(bool condition, float a, float b) {
  return std::bit_cast<float>(
      select(condition, std::bit_cast<uint32_t>(a), std::bit_cast<uint32_t>(b)));
}

// Relative error 2e-7; 0 below -87, where the result would leave the normal range.
FUSEDCONV_INLINE float exp_of_nonpositive(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  float const bounded = select(x < -87.0f, -87.0f, x);
  float const shifted = bounded * 1.44269504f + kRound;
  float const n = shifted - kRound;
  // ln 2 in two parts; the first has 17 bits, so that n times it is exact.
  float const r = (bounded - n * 0.693145751953125f) - n * 1.42860677e-6f;
  // (e^r - 1 - r) / r^2 interpolated at the Chebyshev nodes of |r| <= ln(2) / 2.
  float const p = 0.5f + r * (0.1666657338f +
                              r * (0.04166655011f + r * (0.008363773874f + r * 0.001392692661f)));
  float const mantissa = 1.0f + (r + r * r * p);
  float const scale = std::bit_cast<float>((std::bit_cast<uint32_t>(shifted) << 23) + 0x3f800000u);
  return select(x < -87.0f, 0.0f, mantissa * scale);
}

// x Phi(x), with Phi(-a) = exp(-a^2 / 2) h(a) and h(a) = erfcx(a / sqrt 2) / 2. Unlike 1 + erf(x),
// this does not cancel for negative x. h is a rational minimax approximation on [0, 13.3] (weighted
// linear least squares, Lawson's weights, fitted in 50 digits): relative error 5e-9, and all
// coefficients positive. x * 0 keeps NaN for -inf, as PyTorch has it.
FUSEDCONV_INLINE float gelu(float x) {
  float const magnitude = std::fabs(x);
  float const a = select(magnitude > 14.0f, 14.0f, magnitude);
  float const numerator =
      0.500000002445f + a * (0.435678692055f + a * (0.181300439161f + a * (0.0399818270457f +
                                                                           a * 0.00401976981466f)));
  float const denominator =
      1.0f + a * (1.66924229912f +
                  a * (1.19445942815f +
                       a * (0.464363417702f + a * (0.100226960492f + a * 0.0100759254296f))));
  float const tail = exp_of_nonpositive(-0.5f * x * x) * (numerator / denominator);
  return x * select(x < 0.0f, tail, 1.0f - tail);
}

// x / (1 + exp(-u)).
FUSEDCONV_INLINE float times_logistic(float x, float u) {
  float const e = exp_of_nonpositive(-std::fabs(u));
  return x * (select(u < 0.0f, e, 1.0f) / (1.0f + e));
}

FUSEDCONV_INLINE float silu(float x) { return times_logistic(x, x); }

// (1 + tanh u) / 2 is the logistic function of 2 u.
FUSEDCONV_INLINE float gelu_tanh(float x) {
  return times_logistic(x, 1.5957691216f * (x + 0.044715f * x * x * x));
}

FUSEDCONV_INLINE float relu(float x) { return select(x < 0.0f, 0.0f, x); }  // NaN stays

FUSEDCONV_INLINE float from_float16(uint16_t bits) {
  uint32_t const magnitude = static_cast<uint32_t>(bits & 0x7fffu) << 13;
  uint32_t const exponent = magnitude & 0x0f800000u;
  uint32_t const normal =
      magnitude + (112u << 23) + select(exponent == 0x0f800000u, 112u << 23, 0u);
  // A denormal gets an implicit one, which the subtraction of 2^-14 takes off again.
  float const denormal = std::bit_cast<float>(magnitude + (113u << 23)) - 0x1p-14f;
  uint32_t const value = select(exponent == 0u, std::bit_cast<uint32_t>(denormal), normal);
  return std::bit_cast<float>(value | static_cast<uint32_t>(bits & 0x8000u) << 16);
}

FUSEDCONV_INLINE uint16_t to_float16(float x) {
  uint32_t const bits = std::bit_cast<uint32_t>(x);
  uint32_t const magnitude = bits & 0x7fffffffu;
  uint32_t const normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  // 0.5 has the unit in the last place of a float16 denormal: the addition rounds to it.
  uint32_t const denormal =
      std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t const special = select(magnitude > 0x7f800000u, 0x7e00u, 0x7c00u);
  uint32_t const finite = select(magnitude < (113u << 23), denormal, normal);
  uint32_t const value = select(magnitude >= (143u << 23), special, finite);
  return static_cast<uint16_t>(value | (bits >> 16 & 0x8000u));
}

FUSEDCONV_INLINE float from_bfloat16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

FUSEDCONV_INLINE uint16_t to_bfloat16(float x) {
  uint32_t const bits = std::bit_cast<uint32_t>(x);
  uint32_t const rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  uint32_t const nan = (bits >> 16 & 0x8000u) | 0x7fc0u;
  return static_cast<uint16_t>(select((bits & 0x7fffffffu) > 0x7f800000u, nan, rounded));
}

// ---- Inner loops ----

// x and y may be the same array.
#define FUSEDCONV_MAP(name, function, From, To)                     \
  FUSEDCONV_CLONES void name(From const* x, To* y, int64_t count) { \
    FUSEDCONV_INDEPENDENT                                           \
    for (int64_t i = 0; i < count; ++i) y[i] = function(x[i]);      \
  }
FUSEDCONV_MAP(widen_float16, from_float16, uint16_t, float)
FUSEDCONV_MAP(widen_bfloat16, from_bfloat16, uint16_t, float)
FUSEDCONV_MAP(narrow_float16, to_float16, float, uint16_t)
FUSEDCONV_MAP(narrow_bfloat16, to_bfloat16, float, uint16_t)
FUSEDCONV_MAP(map_relu, relu, float, float)
FUSEDCONV_MAP(map_gelu, gelu, float, float)
FUSEDCONV_MAP(map_gelu_tanh, gelu_tanh, float, float)
FUSEDCONV_MAP(map_silu, silu, float, float)
#undef FUSEDCONV_MAP

// Merges a block of [rows, lanes] into the lanes' running moments over `rows_before` rows. Lanes
// beside `center`, `deviation` and `square` are scratch. `deviation` corrects what rounding left in
// `center`: a large mean costs no accuracy.
FUSEDCONV_CLONES void add_block(float const* __restrict x, int64_t rows, int64_t lanes,
                                double rows_before, float* __restrict center,
                                float* __restrict deviation, float* __restrict square,
                                double* __restrict mean, double* __restrict m2) {
  int64_t const count = rows * lanes;
  for (int64_t i = 0; i < lanes; ++i) center[i] = 0.0f;
  for (int64_t row = 0; row < count; row += lanes) {
    for (int64_t i = 0; i < lanes; ++i) center[i] += x[row + i];
  }
  float const reciprocal = 1.0f / static_cast<float>(rows);
  for (int64_t i = 0; i < lanes; ++i) {
    center[i] *= reciprocal;
    deviation[i] = 0.0f;
    square[i] = 0.0f;
  }
  for (int64_t row = 0; row < count; row += lanes) {
    for (int64_t i = 0; i < lanes; ++i) {
      float const d = x[row + i] - center[i];
      deviation[i] += d;
      square[i] += d * d;
    }
  }
  double const per_row = 1.0 / static_cast<double>(rows);
  double const share = static_cast<double>(rows) / (rows_before + static_cast<double>(rows));
  double const weight = rows_before * share;
  for (int64_t i = 0; i < lanes; ++i) {
    double const correction = deviation[i] * per_row;
    double const delta = (center[i] + correction) - mean[i];
    mean[i] += delta * share;
    m2[i] += (square[i] - deviation[i] * correction) + delta * delta * weight;
  }
}

struct Moments {
  double mean = 0.0;
  double m2 = 0.0;  // the sum of squared deviations
};

FUSEDCONV_INLINE double total(double const (&part)[8]) {
  return ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
}

// The moments of a group of `elements`, whose lanes are runs of `run` from `begin` on, `stride`
// apart. A lane has the moments of rows[lane] elements.
FUSEDCONV_CLONES Moments merge_lanes(int64_t begin, int64_t end, int64_t stride, int64_t run,
                                     int64_t elements, double const* rows, double const* mean,
                                     double const* m2) {
  double sum[8] = {}, square[8] = {};
  for (int64_t first = begin; first < end; first += stride) {
    int64_t lane = first;
    for (; lane + 8 <= first + run; lane += 8) {
      for (int k = 0; k < 8; ++k) sum[k] += rows[lane + k] * mean[lane + k];
    }
    for (; lane < first + run; ++lane) sum[0] += rows[lane] * mean[lane];
  }
  double const center = total(sum) / static_cast<double>(elements);
  auto const about_center = [=](int64_t lane) __attribute__((always_inline)) {
    return m2[lane] + rows[lane] * (mean[lane] - center) * (mean[lane] - center);
  };
  for (int64_t first = begin; first < end; first += stride) {
    int64_t lane = first;
    for (; lane + 8 <= first + run; lane += 8) {
      for (int k = 0; k < 8; ++k) square[k] += about_center(lane + k);
    }
    for (; lane < first + run; ++lane) square[0] += about_center(lane);
  }
  return {center, total(square)};
}

// The arrays of mean, scale and shift repeat every `lanes` elements.
FUSEDCONV_CLONES void apply_to_lanes(float const* x, float* y, int64_t count, int64_t lanes,
                                     float const* mean, float const* scale, float const* shift) {
  for (int64_t row = 0; row < count; row += lanes) {
    int64_t const end = std::min(lanes, count - row);
    FUSEDCONV_INDEPENDENT
    for (int64_t i = 0; i < end; ++i) y[row + i] = (x[row + i] - mean[i]) * scale[i] + shift[i];
  }
}

// Each element of mean, scale and shift serves `pixels` elements, the first of them `skip` fewer.
FUSEDCONV_CLONES void apply_to_pixels(float const* x, float* y, int64_t count, int64_t pixels,
                                      int64_t skip, float const* mean, float const* scale,
                                      float const* shift) {
  for (int64_t row = -skip; row < count; row += pixels, ++mean, ++scale, ++shift) {
    float const m = *mean, a = *scale, b = *shift;
    int64_t const end = std::min(row + pixels, count);
    FUSEDCONV_INDEPENDENT
    for (int64_t i = std::max<int64_t>(row, 0); i < end; ++i) y[i] = (x[i] - m) * a + b;
  }
}

// x and y may be the same array.
void activate(Activation activation, float const* x, float* y, int64_t count) {
  switch (activation) {
    case Activation::kIdentity: return;
    case Activation::kRelu: return map_relu(x, y, count);
    case Activation::kGelu: return map_gelu(x, y, count);
    case Activation::kGeluTanh: return map_gelu_tanh(x, y, count);
    case Activation::kSilu: return map_silu(x, y, count);
  }
}

void widen(DType dtype, void const* base, int64_t offset, float* to, int64_t count) {
  switch (dtype) {
    case DType::kFloat32:
      std::memcpy(to, static_cast<float const*>(base) + offset, count * sizeof(float));
      return;
    case DType::kFloat16:
      return widen_float16(static_cast<uint16_t const*>(base) + offset, to, count);
    case DType::kBFloat16:
      return widen_bfloat16(static_cast<uint16_t const*>(base) + offset, to, count);
  }
}

// ---- The problem, cut up ----

struct Statistics {
  double mean = 0.0;
  double rstd = 0.0;
};

// Uninitialised, aligned so that no vector straddles two cache lines.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t count)
      : data_(static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t{64}))) {}
  T* get() const { return data_.get(); }
  T& operator[](int64_t index) const { return data_.get()[index]; }

 private:
  struct Delete {
    void operator()(T* data) const { ::operator delete(data, std::align_val_t{64}); }
  };
  std::unique_ptr<T, Delete> data_;
};

// What one thread needs; made before the parallel region, in which nothing may throw.
struct Workspace {
  int64_t block, lanes, channels;
  Buffer<float> input{block}, output{block};
  Buffer<float> center{lanes}, deviation{lanes}, square{lanes};
  Buffer<double> lane_mean{lanes}, lane_m2{lanes}, lane_rows{lanes};
  Buffer<float> mean{channels}, scale{channels}, shift{channels};  // of the affine map
};

class Run {
 public:
  Run(GroupNormProblem const& problem, GroupNormTensors const& tensors, int threads)
      : problem_(problem), tensors_(tensors), last_(problem.layout == Layout::kChannelsLast) {
    period_ = last_ ? problem.channels : 1;
    groups_ = last_ ? problem.groups : 1;
    units_ = last_ ? problem.batch : problem.batch * problem.groups;
    length_ = last_ ? problem.channels * problem.pixels : problem.group_size();
    // Channels repeat until a row of lanes is long enough and, if possible, made of whole vectors.
    int64_t const repeats = ceil_div(kLanes, period_);
    int64_t const whole = round_up(repeats, kVector / std::gcd(kVector, period_));
    lanes_ = std::min(length_, period_ * (period_ * whole <= kMaxLanes ? whole : repeats));
    block_ = lanes_ * std::max(kBlockRows, kBlock / lanes_);
    int64_t const rows = ceil_div(length_, lanes_);
    int64_t const pieces = ceil_div(rows, std::max(kChunkRows, kChunk / lanes_));
    chunk_ = ceil_div(rows, pieces) * lanes_;
    chunks_ = ceil_div(length_, chunk_);
    int64_t const elements = units_ * length_;
    threads_ = std::min(
        {static_cast<int64_t>(threads), units_ * chunks_, ceil_div(elements, kMinPerThread)});
    whole_ = units_ % threads_ == 0 || units_ >= 8 * threads_;
    int64_t const wave = threads_ * kWavePerThread / length_;
    slots_ = whole_ ? threads_ : std::clamp<int64_t>(wave, 1, units_);

    // What an activation gave is kept: in the output if that is float32, else in a buffer. A large
    // unit is cheaper to activate again.
    bool const wide = problem.dtype == DType::kFloat32;
    bool const fits = slots_ * length_ <= threads_ * kMaxKept;
    keeps_ = problem.activation_before != Activation::kIdentity && (wide || fits);
    if (keeps_ && !wide) kept_.emplace(slots_ * length_);
    partial_.resize(slots_ * chunks_ * groups_);
    total_.resize(slots_ * groups_);
    read_affine(tensors.weight, weight_);
    read_affine(tensors.bias, bias_);
    workspaces_.reserve(threads_);
    for (int64_t thread = 0; thread < threads_; ++thread) {
      workspaces_.push_back({block_, lanes_, last_ ? lanes_ : problem.channels_per_group()});
    }
  }

  void run() {
    FUSEDCONV_OMP(omp parallel num_threads(static_cast<int>(threads_))) {
#ifdef _OPENMP
      int64_t const thread = omp_get_thread_num();
#else
      int64_t const thread = 0;
#endif
      whole_ ? run_units(thread) : run_waves(thread);
    }
  }

 private:
  void run_units(int64_t thread) {
    FUSEDCONV_OMP(omp for schedule(static))
    for (int64_t unit = 0; unit < units_; ++unit) {
      for (int64_t chunk = 0; chunk < chunks_; ++chunk) take_moments(unit, thread, chunk, thread);
      merge_chunks(unit, thread);
      for (int64_t chunk = 0; chunk < chunks_; ++chunk) normalise(unit, thread, chunk, thread);
    }
  }

  void run_waves(int64_t thread) {
    for (int64_t first = 0; first < units_; first += slots_) {
      int64_t const units = std::min(slots_, units_ - first);
      // Both static loops over tasks give a thread the same chunks: its cache holds the second's.
      FUSEDCONV_OMP(omp for schedule(static))
      for (int64_t task = 0; task < units * chunks_; ++task) {
        int64_t const slot = task / chunks_;
        take_moments(first + slot, slot, task % chunks_, thread);
      }
      FUSEDCONV_OMP(omp for schedule(static))
      for (int64_t slot = 0; slot < units; ++slot) merge_chunks(first + slot, slot);
      FUSEDCONV_OMP(omp for schedule(static))
      for (int64_t task = 0; task < units * chunks_; ++task) {
        int64_t const slot = task / chunks_;
        normalise(first + slot, slot, task % chunks_, thread);
      }
    }
  }

  void read_affine(void const* from, std::vector<float>& to) const {
    if (from != nullptr) widen(problem_.affine_dtype, from, 0, to.data(), problem_.channels);
  }

  int64_t chunk_end(int64_t chunk) const { return std::min(length_, (chunk + 1) * chunk_); }

  // The input from `offset` on, as activated float32: where it lies, if it is that, else in `to`.
  float const* load(int64_t offset, int64_t count, float* to) const {
    Activation const activation = problem_.activation_before;
    float const* x = to;
    if (problem_.dtype == DType::kFloat32) {
      x = static_cast<float const*>(tensors_.input) + offset;
      if (activation == Activation::kIdentity) return x;
    } else {
      widen(problem_.dtype, tensors_.input, offset, to, count);
    }
    activate(activation, x, to, count);
    return to;
  }

  // Where activated elements are kept.
  float* kept(int64_t unit, int64_t slot, int64_t offset) const {
    return kept_ ? kept_->get() + slot * length_ + offset
                 : static_cast<float*>(tensors_.output) + unit * length_ + offset;
  }

  void take_moments(int64_t unit, int64_t slot, int64_t chunk, int64_t thread) {
    Workspace const& work = workspaces_[thread];
    int64_t const begin = chunk * chunk_;
    int64_t const end = chunk_end(chunk);
    int64_t const base = unit * length_;
    std::fill_n(work.lane_mean.get(), lanes_, 0.0);
    std::fill_n(work.lane_m2.get(), lanes_, 0.0);
    int64_t rows_before = 0;
    auto add = [&](float const* x, int64_t rows, int64_t lanes) {
      add_block(x, rows, lanes, static_cast<double>(rows_before), work.center.get(),
                work.deviation.get(), work.square.get(), work.lane_mean.get(), work.lane_m2.get());
    };
    for (int64_t offset = begin; offset < end; offset += block_) {
      int64_t const count = std::min(block_, end - offset);
      float const* const x =
          load(base + offset, count, keeps_ ? kept(unit, slot, offset) : work.input.get());
      int64_t const rows = count / lanes_;
      if (rows > 0) add(x, rows, lanes_);
      rows_before += rows;
      // Only the unit's last block can end within a row: the first lanes count one row more.
      if (count % lanes_ != 0) add(x + rows * lanes_, 1, count % lanes_);
    }
    double* const rows = work.lane_rows.get();
    int64_t const longer = (end - begin) % lanes_;
    std::fill_n(rows, longer, static_cast<double>(rows_before + 1));
    std::fill_n(rows + longer, lanes_ - longer, static_cast<double>(rows_before));
    // A group's lanes: its channels in each repetition, or all lanes when there is one group.
    int64_t const stride = groups_ == 1 ? lanes_ : period_;
    int64_t const run = stride / groups_;
    for (int64_t group = 0; group < groups_; ++group) {
      partial_[(slot * chunks_ + chunk) * groups_ + group] =
          merge_lanes(group * run, lanes_, stride, run, (end - begin) / groups_, rows,
                      work.lane_mean.get(), work.lane_m2.get());
    }
  }

  void merge_chunks(int64_t unit, int64_t slot) {
    for (int64_t group = 0; group < groups_; ++group) {
      Moments const* const from = &partial_[slot * chunks_ * groups_ + group];
      Moments sum;
      for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
        double const elements = static_cast<double>(chunk_end(chunk) - chunk * chunk_);
        sum.mean += elements * from[chunk * groups_].mean;
      }
      sum.mean /= static_cast<double>(length_);
      for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
        double const elements = static_cast<double>((chunk_end(chunk) - chunk * chunk_) / groups_);
        double const delta = from[chunk * groups_].mean - sum.mean;
        sum.m2 += from[chunk * groups_].m2 + elements * delta * delta;
      }
      double const variance = sum.m2 * static_cast<double>(groups_) / static_cast<double>(length_);
      // Rounding may leave a constant group a variance just below zero.
      double const rstd = 1.0 / std::sqrt((variance < 0.0 ? 0.0 : variance) + problem_.eps);
      total_[slot * groups_ + group] = {sum.mean, rstd};
      int64_t const index = unit * groups_ + group;
      if (tensors_.mean != nullptr) tensors_.mean[index] = static_cast<float>(sum.mean);
      if (tensors_.rstd != nullptr) tensors_.rstd[index] = static_cast<float>(rstd);
    }
  }

  void normalise(int64_t unit, int64_t slot, int64_t chunk, int64_t thread) {
    Workspace const& work = workspaces_[thread];
    int64_t const begin = chunk * chunk_;
    int64_t const end = chunk_end(chunk);
    int64_t const base = unit * length_;
    int64_t const per_group = problem_.channels_per_group();
    int64_t const first_channel = last_ ? 0 : unit % problem_.groups * per_group;
    int64_t const lane_begin = last_ ? 0 : begin / problem_.pixels;
    int64_t const lane_end = last_ ? lanes_ : ceil_div(end, problem_.pixels);
    for (int64_t lane = lane_begin; lane < lane_end; ++lane) {
      int64_t const channel = last_ ? lane % period_ : lane;
      Statistics const& group = total_[slot * groups_ + (last_ ? channel / per_group : 0)];
      float const mean = static_cast<float>(group.mean);
      double const scale = group.rstd * weight_[first_channel + channel];
      work.mean[lane] = mean;
      work.scale[lane] = static_cast<float>(scale);
      // What rounding took off the mean goes into the shift.
      work.shift[lane] =
          static_cast<float>(bias_[first_channel + channel] + (mean - group.mean) * scale);
    }
    for (int64_t offset = begin; offset < end; offset += block_) {
      int64_t const count = std::min(block_, end - offset);
      float const* const x =
          keeps_ ? kept(unit, slot, offset) : load(base + offset, count, work.input.get());
      bool const direct = problem_.dtype == DType::kFloat32;
      float* const y =
          direct ? static_cast<float*>(tensors_.output) + base + offset : work.output.get();
      if (last_) {
        apply_to_lanes(x, y, count, lanes_, work.mean.get(), work.scale.get(), work.shift.get());
      } else {
        int64_t const channel = offset / problem_.pixels;
        apply_to_pixels(x, y, count, problem_.pixels, offset % problem_.pixels, &work.mean[channel],
                        &work.scale[channel], &work.shift[channel]);
      }
      activate(problem_.activation_after, y, y, count);
      if (direct) continue;
      uint16_t* const output = static_cast<uint16_t*>(tensors_.output) + base + offset;
      if (problem_.dtype == DType::kFloat16) narrow_float16(y, output, count);
      if (problem_.dtype == DType::kBFloat16) narrow_bfloat16(y, output, count);
    }
  }

  GroupNormProblem const& problem_;
  GroupNormTensors const& tensors_;
  std::vector<float> weight_ = std::vector<float>(problem_.channels, 1.0f);
  std::vector<float> bias_ = std::vector<float>(problem_.channels, 0.0f);
  bool last_;
  int64_t period_, groups_;            // channels and groups that interleave in a unit
  int64_t units_, length_;             // units, elements of each
  int64_t lanes_, block_;              // elements of a row, of a block
  int64_t chunk_, chunks_;             // elements of a chunk, chunks of a unit
  int64_t threads_, slots_;            // threads, units in hand at a time
  std::vector<Moments> partial_;       // [slots, chunks, groups]
  std::vector<Statistics> total_;      // [slots, groups]
  bool whole_;                         // threads take whole units
  bool keeps_;                         // step 2 keeps what it activated for step 4
  std::optional<Buffer<float>> kept_;  // [slots, length]
  std::vector<Workspace> workspaces_;
};

}  // namespace

void group_norm(GroupNormProblem const& problem, GroupNormTensors const& tensors, int threads) {
  FUSEDCONV_CHECK(threads >= 1, "threads is ", threads);
  FUSEDCONV_CHECK(problem.batch >= 0, "batch is ", problem.batch);
  FUSEDCONV_CHECK(problem.channels >= 0, "channels is ", problem.channels);
  FUSEDCONV_CHECK(problem.pixels >= 0, "pixels is ", problem.pixels);
  FUSEDCONV_CHECK(problem.groups >= 1, "groups is ", problem.groups);
  FUSEDCONV_CHECK(problem.channels % problem.groups == 0, "channels is ", problem.channels,
                  ", which groups = ", problem.groups, " does not divide");
  for (DType const dtype : {problem.dtype, problem.affine_dtype}) {
    FUSEDCONV_CHECK(dtype >= DType::kFloat32 && dtype <= DType::kBFloat16, "dtype code is ",
                    static_cast<int>(dtype));
  }
  for (Activation const activation : {problem.activation_before, problem.activation_after}) {
    FUSEDCONV_CHECK(activation >= Activation::kIdentity && activation <= Activation::kSilu,
                    "activation code is ", static_cast<int>(activation));
  }
  FUSEDCONV_CHECK(!std::isnan(problem.eps), "eps is ", problem.eps);
  bool const empty = problem.batch == 0 || problem.channels == 0 || problem.pixels == 0;
  if (empty) {
    int64_t const groups = problem.batch * problem.groups;
    if (tensors.mean != nullptr) std::fill_n(tensors.mean, groups, 0.0f);
    if (tensors.rstd != nullptr) {
      std::fill_n(tensors.rstd, groups, std::numeric_limits<float>::quiet_NaN());
    }
    return;
  }
  FUSEDCONV_CHECK(tensors.input != nullptr, "input is null");
  FUSEDCONV_CHECK(tensors.output != nullptr, "output is null");
  Run(problem, tensors, threads).run();
}

}  // namespace fusedconv::cpu
