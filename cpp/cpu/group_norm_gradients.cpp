// The gradients of GroupNorm for processors: sums of each channel of a sample, in parts; what the
// group's sums say of each element; the input's gradient, in parts; sums over the samples in order.
#include "cpu/gradient_sums.hpp"
#include "cpu/group_norm.hpp"
#include "cpu/huge_pages.hpp"
#include "cpu/schedule.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::cpu {
namespace {

// What a group's sums say of its elements; grad_input takes them as GradientOfRun does.
struct Terms {
  float slope, offset;
};

class Backward {
 public:
  Backward(GroupNormProblem const& problem, GradientTensors const& tensors, int threads)
      : problem_(problem),
        tensors_(tensors),
        // With one pixel the layouts are the same.
        last_(problem.input_layout == Layout::kChannelsLast || problem.pixels == 1),
        place_(place_of(problem.activation_before, problem.activation_after)),
        groups_(last_ ? problem.groups : 1),
        channels_(problem.channels_per_group() * groups_),
        length_(channels_ * problem.pixels),
        rows_(problem.channels, problem.channels * problem.pixels),
        planes_(channels_, problem.pixels),
        pieces_(last_ ? rows_.parts : planes_.pieces),
        schedule_(problem.batch * problem.groups / groups_, length_, parts(),
                  tensors.grad_input == nullptr ? 0 : parts(), threads),
        partial_(schedule_.places() * pieces_ * channels_),
        terms_(schedule_.places() * groups_),
        lanes_(schedule_.threads() * (last_ ? kArrays * (rows_.lanes + kRoom) : 0)),
        sums_(problem.batch * problem.channels),
        affine_(2 * problem.channels) {
    read_affine(problem.affine_dtype, tensors.weight, problem.channels, 1.0f, affine_.get());
    read_affine(problem.affine_dtype, tensors.bias, problem.channels, 0.0f,
                affine_.get() + problem.channels);
  }

  void run() {
    schedule_.run([this](auto... where) { sum(where...); },
                  [this](auto... where) { merge(where...); },
                  [this](auto... where) { differentiate(where...); });
    Buffer<Sums> const totals(problem_.channels);
    sum_pieces(sums_.get(), problem_.batch, problem_.channels, totals.get());
    for (int64_t channel = 0; channel < problem_.channels; ++channel) {
      Sums const& total = totals[channel];
      if (tensors_.grad_bias != nullptr) {
        tensors_.grad_bias[channel] = static_cast<float>(total.gradient);
      }
      if (tensors_.grad_weight != nullptr) {
        tensors_.grad_weight[channel] = static_cast<float>(total.moment);
      }
    }
  }

 private:
  // Of a channel: the sums of g, and of g (a - mean) or g h.
  using Sums = GradientSums;

  static constexpr int kArrays = 7;
  // A thread's arrays of lanes.
  struct Lanes {
    float *mean, *scale, *shift, *slope, *offset, *sum, *moment;
  };

  Lanes lanes_of(int64_t thread) const {
    int64_t const size = rows_.lanes + kRoom;
    float* const first = lanes_.get() + thread * kArrays * size;
    return {first,
            first + size,
            first + 2 * size,
            first + 3 * size,
            first + 4 * size,
            first + 5 * size,
            first + 6 * size};
  }

  int64_t parts() const { return last_ ? rows_.parts : planes_.parts; }
  int64_t group_of(int64_t unit, int64_t channel) const {
    return unit * groups_ + channel / problem_.channels_per_group();
  }
  // The index in `weight` of a unit's channel.
  int64_t channel_of(int64_t unit, int64_t channel) const {
    return unit % (problem_.groups / groups_) * channels_ + channel;
  }
  float scale_of(int64_t unit, int64_t channel) const {
    return tensors_.rstd[group_of(unit, channel)] * affine_[channel_of(unit, channel)];
  }
  float shift_of(int64_t unit, int64_t channel) const {
    return affine_[problem_.channels + channel_of(unit, channel)];
  }

  // Group by group: a division for each channel of each part would take as long as the part.
  void fill_lanes(int64_t unit, Lanes const& lanes) const {
    float const* const weight = affine_.get();
    float const* const bias = weight + problem_.channels;
    int64_t const run = problem_.channels_per_group();
    for (int64_t group = 0; group < groups_; ++group) {
      float const mean = tensors_.mean[unit * groups_ + group];
      float const rstd = tensors_.rstd[unit * groups_ + group];
      for (int64_t channel = group * run; channel < (group + 1) * run; ++channel) {
        lanes.mean[channel] = mean;
        lanes.scale[channel] = rstd * weight[channel];
        lanes.shift[channel] = bias[channel];
      }
    }
    for (float* const array : {lanes.mean, lanes.scale, lanes.shift}) repeat(array);
  }
  void repeat(float* array) const {
    for (int64_t lane = channels_; lane < rows_.lanes; ++lane) {
      array[lane] = array[lane - channels_];
    }
  }

  // ---- Sums ----

  // [places, pieces, channels]
  Sums& partial(int64_t place, int64_t piece, int64_t channel) const {
    return partial_[(place * pieces_ + piece) * channels_ + channel];
  }

  void sum(int64_t unit, int64_t place, int64_t part, int64_t thread) {
    if (!last_) {
      auto* const loop = loops_.sums_of_run[index_of(problem_.dtype)][place_];
      float const mean = tensors_.mean[unit];
      planes_.for_each(part, channels_, problem_.pixels,
                       [&](int64_t channel, int64_t first, int64_t count, int64_t piece) {
                         int64_t const offset = unit * length_ + channel * problem_.pixels + first;
                         double sums[2] = {};
                         loop(grad(offset), input(offset), count, mean, scale_of(unit, channel),
                              shift_of(unit, channel), sums);
                         partial(place, piece, channel) = {sums[0], sums[1]};
                       });
      return;
    }
    Lanes const lanes = lanes_of(thread);
    fill_lanes(unit, lanes);
    int64_t const begin = part * rows_.elements_of_part;
    int64_t const count = std::min(rows_.elements_of_part, length_ - begin);
    loops_.sums_of_rows[index_of(problem_.dtype)][place_](
        grad(unit * length_ + begin), input(unit * length_ + begin), count, rows_.lanes, lanes.mean,
        lanes.scale, lanes.shift, lanes.sum, lanes.moment);
    int64_t const end = std::min(rows_.lanes, count);
    sum_lanes(lanes.sum, lanes.moment, end, channels_, &partial(place, part, 0));
  }

  void merge(int64_t unit, int64_t place) {
    double const size = static_cast<double>(problem_.group_size());
    int64_t const run = problem_.channels_per_group();
    Sums* const totals = &sums_[unit * channels_];
    sum_pieces(&partial(place, 0, 0), pieces_, channels_, totals);
    for (int64_t group = 0; group < groups_; ++group) {
      double const rstd = static_cast<double>(tensors_.rstd[unit * groups_ + group]);
      double gradient = 0.0, projection = 0.0;
      for (int64_t channel = group * run; channel < (group + 1) * run; ++channel) {
        Sums& total = totals[channel];
        total.moment *= rstd;
        double const weight = static_cast<double>(affine_[channel_of(unit, channel)]);
        gradient += weight * total.gradient;
        projection += weight * total.moment;
      }
      terms_[place * groups_ + group] = {static_cast<float>(rstd * rstd * projection / size),
                                         static_cast<float>(rstd * gradient / size)};
    }
  }

  // ---- The input's gradient ----

  void differentiate(int64_t unit, int64_t place, int64_t part, int64_t thread) {
    Terms const* const terms = terms_.get() + place * groups_;
    if (!last_) {
      auto* const loop =
          loops_.gradient_of_run[index_of(problem_.dtype)][index_of(problem_.output_dtype)][place_];
      float const mean = tensors_.mean[unit];
      planes_.for_each(part, channels_, problem_.pixels,
                       [&](int64_t channel, int64_t first, int64_t count, int64_t) {
                         int64_t const offset = unit * length_ + channel * problem_.pixels + first;
                         loop(grad(offset), input(offset), grad_input(offset), count, mean,
                              scale_of(unit, channel), shift_of(unit, channel), terms->slope,
                              terms->offset);
                       });
      return;
    }
    Lanes const lanes = lanes_of(thread);
    fill_lanes(unit, lanes);
    int64_t const run = problem_.channels_per_group();
    for (int64_t group = 0; group < groups_; ++group) {
      std::fill_n(lanes.slope + group * run, run, terms[group].slope);
      std::fill_n(lanes.offset + group * run, run, terms[group].offset);
    }
    for (float* const array : {lanes.slope, lanes.offset}) repeat(array);
    int64_t const begin = part * rows_.elements_of_part;
    int64_t const offset = unit * length_ + begin;
    loops_.gradient_of_rows[index_of(problem_.dtype)][index_of(problem_.output_dtype)][place_](
        grad(offset), input(offset), grad_input(offset),
        std::min(rows_.elements_of_part, length_ - begin), rows_.lanes, lanes.mean, lanes.scale,
        lanes.shift, lanes.slope, lanes.offset);
  }

  void const* grad(int64_t offset) const {
    return at(tensors_.grad_output, problem_.dtype, offset);
  }
  void const* input(int64_t offset) const { return at(tensors_.input, problem_.dtype, offset); }
  void* grad_input(int64_t offset) const {
    return at(tensors_.grad_input, problem_.output_dtype, offset);
  }

  GroupNormProblem const& problem_;
  GradientTensors const& tensors_;
  BackwardLoops const& loops_ = loops().backward;
  bool last_;                  // channels come last
  int place_;                  // of the activation
  int64_t groups_, channels_;  // of a unit: one group, or a sample with all of them
  int64_t length_;             // elements of a unit
  Rows rows_;                  // of a unit whose channels come last
  Planes planes_;              // of one whose channels come first
  int64_t pieces_;             // partial sums of a channel
  Schedule schedule_;
  Buffer<Sums> partial_;  // [places, pieces, channels]
  Buffer<Terms> terms_;   // [places, groups of a unit]
  Buffer<float> lanes_;   // [threads, arrays, lanes]
  Buffer<Sums> sums_;     // [batch, channels]
  Buffer<float> affine_;  // [weight bias, channels]
};

}  // namespace

void group_norm_gradients(GroupNormProblem const& problem, GradientTensors const& tensors,
                          int threads) {
  check_gradients(problem, threads);
  check_one_activation(problem);
  if (is_empty(problem)) {
    for (float* const grad : {tensors.grad_weight, tensors.grad_bias}) {
      if (grad != nullptr) std::fill_n(grad, problem.channels, 0.0f);
    }
    return;
  }
  FUSEDCONV_CHECK(tensors.grad_output != nullptr, "grad_output: got null");
  FUSEDCONV_CHECK(tensors.input != nullptr, "input: got null");
  FUSEDCONV_CHECK(tensors.mean != nullptr, "mean: got null");
  FUSEDCONV_CHECK(tensors.rstd != nullptr, "rstd: got null");
  if (tensors.grad_input != nullptr) {
    advise_huge_pages(tensors.grad_input, problem.batch * problem.channels * problem.pixels *
                                              size_of(problem.output_dtype));
  }
  Backward(problem, tensors, threads).run();
}

}  // namespace fusedconv::cpu
