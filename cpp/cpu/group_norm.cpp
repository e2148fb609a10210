// GroupNorm for processors. Moments of a part are sums about a pivot, the mean of the part's first
// elements: by the share of the part that those are, the pivot's distance from the mean is bounded
// in standard deviations, so that a large mean costs no accuracy. Parts merge in order by Chan's
// formula, in double. Then each part gets its affine map and activation. An activation in front is
// computed once where what it gives stays in cache, else twice. Where the output has the other
// layout, tiles of it are transposed in cache.
#include "cpu/group_norm.hpp"

#include <cmath>
#include <limits>

#include "cpu/schedule.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::cpu {
namespace {

constexpr int64_t kPivot = 512;        // elements of a run whose mean is the pivot
constexpr int64_t kPivotRows = 4;      // the same for rows
constexpr int64_t kTile = 8192;        // elements of a tile: 32 KiB of float32
constexpr int64_t kTilePixels = 64;    // at most
constexpr int64_t kMaxOwn = 1 << 18;   // elements of a unit: 1 MiB of float32, a core's own cache
constexpr int64_t kMaxKept = 1 << 22;  // 16 MiB: of the cache that cores share

struct Moments {
  double mean = 0.0;
  double m2 = 0.0;  // the sum of squared deviations
};

// The sums of a group about a pivot; `sums` are of x - pivot and its square.
Moments moments_about(double pivot, double const (&sums)[2], double count) {
  double const shift = sums[0] / count;
  return {pivot + shift, std::max(0.0, sums[1] - shift * sums[0])};
}

class Forward {
 public:
  Forward(GroupNormProblem const& problem, GroupNormTensors const& tensors, int threads,
          bool normalises)
      : problem_(problem),
        tensors_(tensors),
        normalises_(normalises),
        // With one pixel or channel the layouts are the same.
        last_(problem.input_layout == Layout::kChannelsLast || problem.pixels == 1),
        transposes_(problem.input_layout != problem.output_layout && problem.pixels > 1 &&
                    problem.channels > 1),
        groups_(last_ || transposes_ ? problem.groups : 1),
        channels_(problem.channels_per_group() * groups_),
        length_(channels_ * problem.pixels),
        rows_(problem.channels, problem.channels * problem.pixels),
        planes_(channels_, problem.pixels),
        pieces_(ceil_div(problem.group_size(), kPart)),
        tile_pixels_(tile_pixels()),
        transposed_parts_(ceil_div(problem.pixels, std::max(tile_pixels_, kPart / channels_))),
        reads_(!normalises ? 0
               : last_     ? rows_.parts
                           : groups_ * pieces_),
        writes_(last_         ? rows_.parts
                : transposes_ ? transposed_parts_
                              : planes_.parts),
        // By the unit alone: what is computed twice may be rounded otherwise.
        keeps_(normalises && is_costly(problem.activation_before) && length_ <= kMaxKept),
        schedule_(problem.batch * problem.groups / groups_, length_, reads_, writes_, threads,
                  keeps_ && length_ > kMaxOwn),
        kept_(keeps_ ? schedule_.places() * length_ : 0),
        dtype_(keeps_ ? DType::kFloat32 : problem.dtype),
        before_(keeps_ ? Activation::kIdentity : problem.activation_before),
        moments_(schedule_.places() * reads_ * (last_ ? groups_ : 1)),
        maps_(schedule_.places() * 3 * map_length()),
        lanes_(schedule_.threads() * (last_ ? 3 * (rows_.lanes + kRoom) : 0)),
        staged_((!keeps_ && tensors.input == tensors.output) ||
                (before_ != Activation::kIdentity &&
                 problem.activation_after != Activation::kIdentity)),
        tile_size_(transposes_ ? channels_ * tile_pixels_ : std::max(kTile, rows_.lanes)),
        tiles_(transposes_ || staged_ ? schedule_.threads() * 2 * tile_size_ : 0),
        affine_(2 * problem.channels) {
    read_affine(problem.affine_dtype, tensors.weight, problem.channels, 1.0f, affine_.get());
    read_affine(problem.affine_dtype, tensors.bias, problem.channels, 0.0f,
                affine_.get() + problem.channels);
  }

  void run() {
    schedule_.run([this](auto... where) { take_moments(where...); },
                  [this](auto... where) { merge(where...); },
                  [this](auto... where) { normalise(where...); });
  }

 private:
  // Whether computing it twice takes longer than keeping it.
  static bool is_costly(Activation activation) {
    return activation != Activation::kIdentity && activation != Activation::kRelu;
  }

  // Elements of a unit: as they were given, or activated and kept. dtype_ and before_ are theirs.
  void const* source(int64_t unit, int64_t place, int64_t offset) const {
    return keeps_ ? kept_.get() + place * length_ + offset
                  : at(tensors_.input, problem_.dtype, unit * length_ + offset);
  }
  void keep(int64_t unit, int64_t place, int64_t offset, int64_t count) const {
    if (!keeps_) return;
    int const activation = place_of(problem_.activation_before, Activation::kIdentity);
    loops_.apply_to_run[index_of(problem_.dtype)][kFloat][activation](
        at(tensors_.input, problem_.dtype, unit * length_ + offset),
        kept_.get() + place * length_ + offset, count, 0.0f, 1.0f, 0.0f);
  }

  // ---- Moments ----

  void take_moments(int64_t unit, int64_t place, int64_t part, int64_t thread) {
    last_ ? take_moments_of_rows(unit, place, part, thread)
          : take_moments_of_run(unit, place, part);
  }

  void take_moments_of_run(int64_t unit, int64_t place, int64_t part) {
    auto* const loop = loops_.moments_of_run[index_of(dtype_)][index_of(before_)];
    int64_t const size = problem_.group_size();
    int64_t const begin = part % pieces_ * piece(size);
    int64_t const count = std::min(piece(size), size - begin);
    int64_t const offset = part / pieces_ * size + begin;
    keep(unit, place, offset, count);
    void const* const x = source(unit, place, offset);
    double first[2] = {}, sums[2] = {};
    int64_t const head = std::min(kPivot, count);
    loop(x, head, 0.0f, first);
    float const pivot = static_cast<float>(first[0] / static_cast<double>(head));
    loop(x, count, pivot, sums);
    moments_[place * reads_ + part] = moments_about(pivot, sums, static_cast<double>(count));
  }

  int64_t piece(int64_t size) const { return ceil_div(size, pieces_); }

  void take_moments_of_rows(int64_t unit, int64_t place, int64_t part, int64_t thread) {
    auto* const loop = loops_.moments_of_rows[index_of(dtype_)][index_of(before_)];
    int64_t const lanes = rows_.lanes;
    float* const pivot = lanes_.get() + thread * 3 * (lanes + kRoom);
    float* const sum = pivot + lanes + kRoom;
    float* const square = sum + lanes + kRoom;
    int64_t const begin = part * rows_.elements_of_part;
    int64_t const count = std::min(rows_.elements_of_part, length_ - begin);
    keep(unit, place, begin, count);
    void const* const x = source(unit, place, begin);
    Moments* const found = &moments_[(place * reads_ + part) * groups_];
    int64_t const head = std::min(count, kPivotRows * lanes);
    std::fill_n(pivot, lanes, 0.0f);
    loop(x, head, lanes, pivot, sum, square);
    for (int64_t group = 0; group < groups_; ++group) {
      double const mean = sum_of_group(sum, group, head) / static_cast<double>(head / groups_);
      found[group].mean = static_cast<float>(mean);
    }
    for_each_run(lanes, [&](int64_t group, int64_t lane, int64_t run) {
      std::fill_n(pivot + lane, run, static_cast<float>(found[group].mean));
    });
    loop(x, count, lanes, pivot, sum, square);
    for (int64_t group = 0; group < groups_; ++group) {
      double const sums[2] = {sum_of_group(sum, group, count), sum_of_group(square, group, count)};
      found[group] = moments_about(found[group].mean, sums, static_cast<double>(count / groups_));
    }
  }

  // Calls body(group, first lane, lanes) for each pixel and group in a row.
  template <class Body>
  void for_each_run(int64_t lanes, Body body) const {
    int64_t const run = problem_.channels_per_group();
    int64_t group = 0;
    for (int64_t lane = 0; lane < lanes; lane += run) {
      body(group, lane, run);
      if (++group == groups_) group = 0;
    }
  }

  // The sum of a group's lanes in `count` elements.
  double sum_of_group(float const* lane_sums, int64_t group, int64_t count) const {
    int64_t const run = problem_.channels_per_group();
    int64_t const lanes = std::min(rows_.lanes, count);
    double sum[4] = {};
    for (int64_t first = group * run; first < lanes; first += problem_.channels) {
      int64_t i = 0;
      for (; i + 4 <= run; i += 4) {
        for (int k = 0; k < 4; ++k) sum[k] += static_cast<double>(lane_sums[first + i + k]);
      }
      for (; i < run; ++i) sum[0] += static_cast<double>(lane_sums[first + i]);
    }
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
  }

  // ---- Statistics ----

  double elements_of_part(int64_t part) const {
    if (last_) {
      int64_t const begin = part * rows_.elements_of_part;
      return static_cast<double>(std::min(rows_.elements_of_part, length_ - begin) / groups_);
    }
    int64_t const size = problem_.group_size();
    return static_cast<double>(std::min(piece(size), size - part * piece(size)));
  }

  void merge(int64_t unit, int64_t place) {
    if (!normalises_) {
      for (int64_t group = 0; group < groups_; ++group) {
        map_group(group, place, unit * groups_ + group, 0.0, 1.0);
      }
      return;
    }
    int64_t const parts = last_ ? rows_.parts : pieces_;
    double const size = static_cast<double>(problem_.group_size());
    for (int64_t group = 0; group < groups_; ++group) {
      Moments const* const from =
          &moments_[place * reads_ * (last_ ? groups_ : 1) + (last_ ? group : group * parts)];
      int64_t const step = last_ ? groups_ : 1;
      Moments total;
      for (int64_t part = 0; part < parts; ++part) {
        total.mean += elements_of_part(part) * from[part * step].mean;
      }
      total.mean /= size;
      for (int64_t part = 0; part < parts; ++part) {
        double const delta = from[part * step].mean - total.mean;
        total.m2 += from[part * step].m2 + elements_of_part(part) * delta * delta;
      }
      double const rstd = 1.0 / std::sqrt(total.m2 / size + problem_.eps);
      int64_t const index = unit * groups_ + group;
      if (tensors_.mean != nullptr) tensors_.mean[index] = static_cast<float>(total.mean);
      if (tensors_.rstd != nullptr) tensors_.rstd[index] = static_cast<float>(rstd);
      map_group(group, place, index, total.mean, rstd);
    }
  }

  // Elements of each of a place's arrays of means, scales and shifts: of channels, or of lanes.
  int64_t map_length() const { return last_ ? rows_.lanes + kRoom : channels_; }

  void map_group(int64_t group, int64_t place, int64_t index, double mean, double rstd) {
    int64_t const run = problem_.channels_per_group();
    int64_t const first = index % problem_.groups * run;
    float* const means = maps_.get() + place * 3 * map_length();
    float* const scales = means + map_length();
    float* const shifts = scales + map_length();
    float const rounded = static_cast<float>(mean);
    for (int64_t i = 0; i < run; ++i) {
      double const scale = rstd * static_cast<double>(affine_[first + i]);
      int64_t const channel = group * run + i;
      means[channel] = rounded;
      scales[channel] = static_cast<float>(scale);
      // What rounding took off the mean goes into the shift; nothing, where a scale is infinite.
      double const lost = static_cast<double>(rounded) - mean;
      shifts[channel] =
          static_cast<float>(static_cast<double>(affine_[problem_.channels + first + i]) +
                             (lost == 0.0 ? 0.0 : lost * scale));
    }
    if (!last_ || group + 1 < groups_) return;
    for (float* const array : {means, scales, shifts}) {
      for (int64_t lane = channels_; lane < rows_.lanes; ++lane) {
        array[lane] = array[lane - channels_];
      }
    }
  }

  // ---- Affine map, activation, layout ----

  void normalise(int64_t unit, int64_t place, int64_t part, int64_t thread) {
    float const* const mean = maps_.get() + place * 3 * map_length();
    float const* const scale = mean + map_length();
    float const* const shift = scale + map_length();
    float* const tile = transposes_ || staged_ ? tiles_.get() + thread * 2 * tile_size_ : nullptr;
    if (last_) {
      int64_t const begin = part * rows_.elements_of_part;
      int64_t const end = std::min(begin + rows_.elements_of_part, length_);
      if (!transposes_) {
        apply_to_rows(source(unit, place, begin), unit * length_ + begin, end - begin, mean, scale,
                      shift, tile);
        return;
      }
      int64_t const block = channels_ * tile_pixels_;
      for (int64_t offset = begin; offset < end; offset += block) {
        int64_t const count = std::min(block, end - offset);
        loops_.apply_to_rows[index_of(dtype_)][kFloat][first_place()](
            source(unit, place, offset), tile, count, rows_.lanes, mean, scale, shift);
        transpose(tile, count / channels_, channels_, unit * length_ + offset / channels_,
                  problem_.pixels);
      }
    } else if (!transposes_) {
      planes_.for_each(part, channels_, problem_.pixels,
                       [&](int64_t plane, int64_t first, int64_t count, int64_t) {
                         int64_t const offset = plane * problem_.pixels + first;
                         apply_to_run(source(unit, place, offset), unit * length_ + offset, count,
                                      mean[plane], scale[plane], shift[plane], tile);
                       });
    } else {
      int64_t const share = ceil_div(problem_.pixels, transposed_parts_);
      int64_t const end = std::min(problem_.pixels, (part + 1) * share);
      for (int64_t pixel = part * share; pixel < end; pixel += tile_pixels_) {
        int64_t const count = std::min(tile_pixels_, end - pixel);
        for (int64_t channel = 0; channel < channels_; ++channel) {
          loops_.apply_to_run[index_of(dtype_)][kFloat][first_place()](
              source(unit, place, channel * problem_.pixels + pixel), tile + channel * count, count,
              mean[channel], scale[channel], shift[channel]);
        }
        transpose(tile, channels_, count, unit * length_ + pixel * channels_, channels_);
      }
    }
  }

  static constexpr int kFloat = index_of(DType::kFloat32);

  // The place of the activation that the affine map's loop applies.
  int first_place() const {
    return place_of(before_, staged_ ? Activation::kIdentity : problem_.activation_after);
  }

  // What is left behind a tile: the second activation, or none.
  void activate(float const* from, void* to, DType dtype, int64_t count) const {
    int const place = place_of(Activation::kIdentity, problem_.activation_after);
    loops_.apply_to_run[kFloat][index_of(dtype)][place](from, to, count, 0.0f, 1.0f, 0.0f);
  }

  void apply_to_rows(void const* x, int64_t offset, int64_t count, float const* mean,
                     float const* scale, float const* shift, float* tile) const {
    DType const dtype = staged_ ? DType::kFloat32 : problem_.output_dtype;
    auto* const loop = loops_.apply_to_rows[index_of(dtype_)][index_of(dtype)][first_place()];
    int64_t const block = staged_ ? tile_size_ / rows_.lanes * rows_.lanes : count;
    for (int64_t i = 0; i < count; i += block) {
      int64_t const size = std::min(block, count - i);
      loop(at(x, dtype_, i), staged_ ? tile : output(offset + i), size, rows_.lanes, mean, scale,
           shift);
      if (staged_) activate(tile, output(offset + i), problem_.output_dtype, size);
    }
  }

  void apply_to_run(void const* x, int64_t offset, int64_t count, float mean, float scale,
                    float shift, float* tile) const {
    DType const dtype = staged_ ? DType::kFloat32 : problem_.output_dtype;
    auto* const loop = loops_.apply_to_run[index_of(dtype_)][index_of(dtype)][first_place()];
    int64_t const block = staged_ ? tile_size_ : count;
    for (int64_t i = 0; i < count; i += block) {
      int64_t const size = std::min(block, count - i);
      loop(at(x, dtype_, i), staged_ ? tile : output(offset + i), size, mean, scale, shift);
      if (staged_) activate(tile, output(offset + i), problem_.output_dtype, size);
    }
  }

  void transpose(float* tile, int64_t rows, int64_t columns, int64_t offset, int64_t stride) const {
    if (staged_) {
      activate(tile, tile + tile_size_, DType::kFloat32, rows * columns);
      tile += tile_size_;
    }
    loops_.transpose[index_of(problem_.output_dtype)](tile, rows, columns, output(offset), stride);
  }

  // Whole rows of lanes and, if there are so many, whole vectors.
  int64_t tile_pixels() const {
    int64_t const repeats = std::max<int64_t>(1, rows_.lanes / problem_.channels);
    int64_t const least = std::lcm<int64_t, int64_t>(16, repeats);
    int64_t const wanted = std::min(kTilePixels, kTile / problem_.channels);
    return std::max(least, wanted / least * least);
  }

  void* output(int64_t offset) const { return at(tensors_.output, problem_.output_dtype, offset); }

  GroupNormProblem const& problem_;
  GroupNormTensors const& tensors_;
  bool normalises_;
  ForwardLoops const& loops_ = loops().forward;
  bool last_;                  // channels come last
  bool transposes_;            // into the other layout
  int64_t groups_, channels_;  // of a unit: one group, or a sample with all of them
  int64_t length_;             // elements of a unit
  Rows rows_;                  // of a unit whose channels come last
  Planes planes_;              // of one whose channels come first
  int64_t pieces_;             // of a group whose channels come first
  int64_t tile_pixels_, transposed_parts_;
  int64_t reads_, writes_;  // parts of a unit
  bool keeps_;              // what the activation in front gives
  Schedule schedule_;
  Buffer<float> kept_;       // [places, elements of a unit]
  DType dtype_;              // of what is normalised
  Activation before_;        // that it still gets
  Buffer<Moments> moments_;  // [places, reads] or [places, reads, groups]
  Buffer<float> maps_;       // [places, mean scale shift, map_length]
  Buffer<float> lanes_;      // [threads, pivot sum square, lanes]
  bool staged_;              // written by way of a tile: two activations are left, or in place
  int64_t tile_size_;
  Buffer<float> tiles_;   // [threads, 2, tile size]
  Buffer<float> affine_;  // [weight bias, channels]
};

}  // namespace

namespace {

void run(GroupNormProblem const& problem, GroupNormTensors const& tensors, int threads,
         bool normalises) {
  prepare_output(problem, tensors);
  Forward(problem, tensors, threads, normalises).run();
}

void check_forward(GroupNormProblem const& problem, int threads) {
  check(problem, threads);
  check_dtypes(problem);
}

}  // namespace

void group_norm(GroupNormProblem const& problem, GroupNormTensors const& tensors, int threads) {
  check_forward(problem, threads);
  if (is_empty(problem)) {
    int64_t const groups = problem.batch * problem.groups;
    if (tensors.mean != nullptr) std::fill_n(tensors.mean, groups, 0.0f);
    if (tensors.rstd != nullptr) {
      std::fill_n(tensors.rstd, groups, std::numeric_limits<float>::quiet_NaN());
    }
    return;
  }
  run(problem, tensors, threads, true);
}

void activate(GroupNormProblem const& problem, GroupNormTensors const& tensors, int threads) {
  check_forward(problem, threads);
  if (!is_empty(problem)) run(problem, tensors, threads, false);
}

}  // namespace fusedconv::cpu
