// GroupNorm for processors. The procedure:
//   1. Cut the tensor into units, contiguous runs with statistics of their own: one (sample, group)
//      when channels come first, one sample with all its groups when channels come last. Cut units
//      into parts, parts into blocks that stay in the first-level cache. No cut depends on the
//      number of threads, so neither do the bits of the result.
//   2. Moments of a part: a block is widened to float32, activated, and seen as rows of `lanes`
//      elements, the lanes a multiple of the channels. Each lane takes its mean over the rows, then
//      sums deviations and their squares (two passes, the second in cache), and merges into the
//      lane's running (mean, M2) by Chan's formula. At the end lanes merge into groups.
//   3. Moments of a unit: the parts' moments merge in order.
//   4. Normalise the part: apply the affine map to the activated elements, activate, narrow.
// Threads take whole units where those divide evenly, else share the parts of a wave of units: so
// few that step 4 finds its input in cache.
#include "cpu/group_norm.hpp"

#ifdef _OPENMP
#include <omp.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <numeric>
#include <optional>
#include <vector>

#include "cpu/loops.hpp"
#include "fusedconv/check.hpp"

#ifdef _OPENMP
#define FUSEDCONV_OMP(directive) _Pragma(#directive)
#else
#define FUSEDCONV_OMP(directive)
#endif

namespace fusedconv::cpu {
namespace {

constexpr int64_t kVector = 16;              // float32 in the widest register
constexpr int64_t kLanes = 4 * kVector;      // at least: independent sums hide the adder's latency
constexpr int64_t kMaxLanes = 2048;          // when channels repeat to fill whole vectors
constexpr int64_t kBlock = 8192;             // 32 KiB of float32
constexpr int64_t kBlockRows = 16;           // at least: Chan's merge is paid once per block
constexpr int64_t kPart = 16384;             // a task
constexpr int64_t kPartRows = 32;            // at least, so that partial moments stay few
constexpr int64_t kWavePerThread = 1 << 17;  // input and output of a thread's share: about 1 MiB
constexpr int64_t kMaxKept = 1 << 21;        // 8 MiB of float32 for each thread
constexpr int64_t kMinPerThread = 8192;      // below, starting a thread costs more than it saves

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
      : problem_(problem), tensors_(tensors), last_(problem.input_layout == Layout::kChannelsLast) {
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
    int64_t const pieces = ceil_div(rows, std::max(kPartRows, kPart / lanes_));
    part_ = ceil_div(rows, pieces) * lanes_;
    parts_ = ceil_div(length_, part_);
    int64_t const elements = units_ * length_;
    threads_ = std::min(
        {static_cast<int64_t>(threads), units_ * parts_, ceil_div(elements, kMinPerThread)});
    whole_ = units_ % threads_ == 0 || units_ >= 8 * threads_;
    int64_t const wave = threads_ * kWavePerThread / length_;
    places_ = whole_ ? threads_ : std::clamp<int64_t>(wave, 1, units_);

    // What an activation gave is kept: in the output if that is float32, else in a buffer. A large
    // unit is cheaper to activate again.
    bool const wide = problem.dtype == DType::kFloat32;
    bool const fits = places_ * length_ <= threads_ * kMaxKept;
    keeps_ = problem.activation_before != Activation::kIdentity && (wide || fits);
    if (keeps_ && !wide) kept_.emplace(places_ * length_);
    partial_.resize(places_ * parts_ * groups_);
    total_.resize(places_ * groups_);
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
      for (int64_t part = 0; part < parts_; ++part) take_moments(unit, thread, part, thread);
      merge_parts(unit, thread);
      for (int64_t part = 0; part < parts_; ++part) normalise(unit, thread, part, thread);
    }
  }

  void run_waves(int64_t thread) {
    for (int64_t first = 0; first < units_; first += places_) {
      int64_t const units = std::min(places_, units_ - first);
      // Both static loops over tasks give a thread the same parts: its cache holds the second's.
      FUSEDCONV_OMP(omp for schedule(static))
      for (int64_t task = 0; task < units * parts_; ++task) {
        int64_t const place = task / parts_;
        take_moments(first + place, place, task % parts_, thread);
      }
      FUSEDCONV_OMP(omp for schedule(static))
      for (int64_t place = 0; place < units; ++place) merge_parts(first + place, place);
      FUSEDCONV_OMP(omp for schedule(static))
      for (int64_t task = 0; task < units * parts_; ++task) {
        int64_t const place = task / parts_;
        normalise(first + place, place, task % parts_, thread);
      }
    }
  }

  void read_affine(void const* from, std::vector<float>& to) const {
    if (from != nullptr) widen(problem_.affine_dtype, from, 0, to.data(), problem_.channels);
  }

  int64_t part_end(int64_t part) const { return std::min(length_, (part + 1) * part_); }

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
  float* kept(int64_t unit, int64_t place, int64_t offset) const {
    return kept_ ? kept_->get() + place * length_ + offset
                 : static_cast<float*>(tensors_.output) + unit * length_ + offset;
  }

  void take_moments(int64_t unit, int64_t place, int64_t part, int64_t thread) {
    Workspace const& work = workspaces_[thread];
    int64_t const begin = part * part_;
    int64_t const end = part_end(part);
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
          load(base + offset, count, keeps_ ? kept(unit, place, offset) : work.input.get());
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
      partial_[(place * parts_ + part) * groups_ + group] =
          merge_lanes(group * run, lanes_, stride, run, (end - begin) / groups_, rows,
                      work.lane_mean.get(), work.lane_m2.get());
    }
  }

  void merge_parts(int64_t unit, int64_t place) {
    for (int64_t group = 0; group < groups_; ++group) {
      Moments const* const from = &partial_[place * parts_ * groups_ + group];
      Moments sum;
      for (int64_t part = 0; part < parts_; ++part) {
        double const elements = static_cast<double>(part_end(part) - part * part_);
        sum.mean += elements * from[part * groups_].mean;
      }
      sum.mean /= static_cast<double>(length_);
      for (int64_t part = 0; part < parts_; ++part) {
        double const elements = static_cast<double>((part_end(part) - part * part_) / groups_);
        double const delta = from[part * groups_].mean - sum.mean;
        sum.m2 += from[part * groups_].m2 + elements * delta * delta;
      }
      double const variance = sum.m2 * static_cast<double>(groups_) / static_cast<double>(length_);
      // Rounding may leave a constant group a variance just below zero.
      double const rstd = 1.0 / std::sqrt((variance < 0.0 ? 0.0 : variance) + problem_.eps);
      total_[place * groups_ + group] = {sum.mean, rstd};
      int64_t const index = unit * groups_ + group;
      if (tensors_.mean != nullptr) tensors_.mean[index] = static_cast<float>(sum.mean);
      if (tensors_.rstd != nullptr) tensors_.rstd[index] = static_cast<float>(rstd);
    }
  }

  void normalise(int64_t unit, int64_t place, int64_t part, int64_t thread) {
    Workspace const& work = workspaces_[thread];
    int64_t const begin = part * part_;
    int64_t const end = part_end(part);
    int64_t const base = unit * length_;
    int64_t const per_group = problem_.channels_per_group();
    int64_t const first_channel = last_ ? 0 : unit % problem_.groups * per_group;
    int64_t const lane_begin = last_ ? 0 : begin / problem_.pixels;
    int64_t const lane_end = last_ ? lanes_ : ceil_div(end, problem_.pixels);
    for (int64_t lane = lane_begin; lane < lane_end; ++lane) {
      int64_t const channel = last_ ? lane % period_ : lane;
      Statistics const& group = total_[place * groups_ + (last_ ? channel / per_group : 0)];
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
          keeps_ ? kept(unit, place, offset) : load(base + offset, count, work.input.get());
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
      if (!direct) narrow(problem_.dtype, y, tensors_.output, base + offset, count);
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
  int64_t part_, parts_;               // elements of a part, parts of a unit
  int64_t threads_, places_;           // threads, units in hand at a time
  std::vector<Moments> partial_;       // [places, parts, groups]
  std::vector<Statistics> total_;      // [places, groups]
  bool whole_;                         // threads take whole units
  bool keeps_;                         // step 2 keeps what it activated for step 4
  std::optional<Buffer<float>> kept_;  // [places, length]
  std::vector<Workspace> workspaces_;
};

template <class E>
void check_code(char const* name, E value) {
  int const code = static_cast<int>(value);
  FUSEDCONV_CHECK(code >= 0 && code < static_cast<int>(kNames<E>.size()), name, ": got code ",
                  code);
}

}  // namespace

void group_norm(GroupNormProblem const& problem, GroupNormTensors const& tensors, int threads) {
  FUSEDCONV_CHECK(threads >= 1, "threads: got ", threads);
  FUSEDCONV_CHECK(problem.batch >= 0, "batch: got ", problem.batch);
  FUSEDCONV_CHECK(problem.channels >= 0, "channels: got ", problem.channels);
  FUSEDCONV_CHECK(problem.pixels >= 0, "pixels: got ", problem.pixels);
  FUSEDCONV_CHECK(problem.groups >= 1, "groups: got ", problem.groups);
  FUSEDCONV_CHECK(problem.channels % problem.groups == 0, "channels: got ", problem.channels,
                  ", which groups = ", problem.groups, " does not divide");
  for (DType const dtype : {problem.dtype, problem.affine_dtype}) check_code("dtype", dtype);
  for (Activation const activation : {problem.activation_before, problem.activation_after}) {
    check_code("activation", activation);
  }
  FUSEDCONV_CHECK(problem.output_dtype == problem.dtype, "output_dtype: got ",
                  name_of(problem.output_dtype), ", dtype is ", name_of(problem.dtype));
  FUSEDCONV_CHECK(problem.output_layout == problem.input_layout, "output_layout: got ",
                  name_of(problem.output_layout), ", input_layout is ",
                  name_of(problem.input_layout));
  FUSEDCONV_CHECK(problem.input_row_channels() == problem.channels, "row_channels: got ",
                  problem.row_channels, " for ", problem.channels, " channels");
  FUSEDCONV_CHECK(!std::isnan(problem.eps), "eps: got ", problem.eps);
  bool const empty = problem.batch == 0 || problem.channels == 0 || problem.pixels == 0;
  if (empty) {
    int64_t const groups = problem.batch * problem.groups;
    if (tensors.mean != nullptr) std::fill_n(tensors.mean, groups, 0.0f);
    if (tensors.rstd != nullptr) {
      std::fill_n(tensors.rstd, groups, std::numeric_limits<float>::quiet_NaN());
    }
    return;
  }
  FUSEDCONV_CHECK(tensors.input != nullptr, "input: got null");
  FUSEDCONV_CHECK(tensors.output != nullptr, "output: got null");
  Run(problem, tensors, threads).run();
}

}  // namespace fusedconv::cpu
