// Gradients through activations and affine maps of channels for processors: one pass, with partial
// sums of each channel, which are added up in double in the order of the parts.
#include <algorithm>

#include "cpu/channel_sums.hpp"
#include "cpu/gradient_sums.hpp"
#include "cpu/huge_pages.hpp"
#include "cpu/schedule.hpp"
#include "cpu/ungrouped_gradients.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::cpu {
namespace {

class MapGradients {
 public:
  MapGradients(GroupNormProblem const& problem, UngroupedGradients const& tensors, int threads)
      : problem_(problem),
        tensors_(tensors),
        place_(place_of(problem.activation_before, problem.activation_after)),
        channels_(problem.channels),
        length_(channels_ * problem.pixels),
        // With one pixel the layouts are the same.
        last_(problem.input_layout == Layout::kChannelsLast || problem.pixels == 1),
        rows_(channels_, length_),
        planes_(channels_, problem.pixels),
        parts_(last_ ? rows_.parts : planes_.parts),
        pieces_(last_ ? rows_.parts : planes_.pieces),
        schedule_(problem.batch * parts_, ceil_div(length_, parts_), 0, 1, threads),
        affine_(3 * (std::max(channels_, rows_.lanes) + kRoom)),
        lanes_(last_ ? schedule_.threads() * 2 * (rows_.lanes + kRoom) : 0),
        partial_(problem.batch * pieces_ * channels_) {
    read_affine(problem.affine_dtype, tensors.weight, channels_, 1.0f, scale());
    read_affine(problem.affine_dtype, tensors.bias, channels_, 0.0f, shift());
    for (float* const array : {scale(), shift()}) {
      for (int64_t lane = channels_; lane < rows_.lanes; ++lane) {
        array[lane] = array[lane - channels_];
      }
    }
    std::fill_n(mean(), rows_.lanes, 0.0f);
  }

  void run() const {
    auto const nothing = [](auto...) {};
    schedule_.run(nothing, nothing, [this](int64_t unit, int64_t, int64_t, int64_t thread) {
      last_ ? rows(unit, thread) : planes(unit);
    });
    Buffer<Sums> const totals(channels_);
    sum_pieces(partial_.get(), problem_.batch * pieces_, channels_, totals.get());
    for (int64_t channel = 0; channel < channels_; ++channel) {
      Sums const& total = totals[channel];
      if (tensors_.grad_bias != nullptr) {
        tensors_.grad_bias[channel] = static_cast<float>(total.gradient);
      }
      if (tensors_.grad_weight != nullptr) {
        tensors_.grad_weight[channel] = static_cast<float>(total.moment);
      }
      if (tensors_.grad_front_bias != nullptr) {
        tensors_.grad_front_bias[channel] =
            static_cast<float>(total.gradient * static_cast<double>(scale()[channel]));
      }
    }
  }

 private:
  // Of a channel: the sums of g and of g a.
  using Sums = GradientSums;

  float* scale() const { return affine_.get(); }
  float* shift() const { return scale() + std::max(channels_, rows_.lanes) + kRoom; }
  float* mean() const { return shift() + (shift() - scale()); }
  // [samples, pieces, channels]
  Sums& partial(int64_t sample, int64_t piece, int64_t channel) const {
    return partial_[(sample * pieces_ + piece) * channels_ + channel];
  }

  void rows(int64_t unit, int64_t thread) const {
    int64_t const sample = unit / parts_, part = unit % parts_;
    int64_t const begin = part * rows_.elements_of_part, offset = sample * length_ + begin;
    int64_t const count = std::min(rows_.elements_of_part, length_ - begin);
    float* const sum = lanes_.get() + thread * 2 * (rows_.lanes + kRoom);
    float* const moment = sum + rows_.lanes + kRoom;
    if (tensors_.grad_input == nullptr) {
      loops_.sums_of_rows[dtype()][place_](grad(offset), input(offset), count, rows_.lanes, mean(),
                                           scale(), shift(), sum, moment);
    } else {
      loops_.map_gradient_of_rows[dtype()][output_dtype()][place_](
          grad(offset), input(offset), grad_input(offset), count, rows_.lanes, scale(), shift(),
          sum, moment);
    }
    int64_t const end = std::min(rows_.lanes, count);
    sum_lanes(sum, moment, end, channels_, &partial(sample, part, 0));
  }

  void planes(int64_t unit) const {
    int64_t const sample = unit / parts_;
    planes_.for_each(
        unit % parts_, channels_, problem_.pixels,
        [&](int64_t channel, int64_t first, int64_t count, int64_t piece) {
          int64_t const offset = (sample * channels_ + channel) * problem_.pixels + first;
          double sums[2] = {};
          if (tensors_.grad_input == nullptr) {
            loops_.sums_of_run[dtype()][place_](grad(offset), input(offset), count, 0.0f,
                                                scale()[channel], shift()[channel], sums);
          } else {
            loops_.map_gradient_of_run[dtype()][output_dtype()][place_](
                grad(offset), input(offset), grad_input(offset), count, scale()[channel],
                shift()[channel], sums);
          }
          partial(sample, piece, channel) = {sums[0], sums[1]};
        });
  }

  int dtype() const { return index_of(problem_.dtype); }
  int output_dtype() const { return index_of(problem_.output_dtype); }
  void const* grad(int64_t offset) const {
    return at(tensors_.grad_output, problem_.dtype, offset);
  }
  void const* input(int64_t offset) const { return at(tensors_.input, problem_.dtype, offset); }
  void* grad_input(int64_t offset) const {
    return at(tensors_.grad_input, problem_.output_dtype, offset);
  }

  GroupNormProblem const& problem_;
  UngroupedGradients const& tensors_;
  BackwardLoops const& loops_ = loops().backward;
  int place_;                  // of the activation
  int64_t channels_, length_;  // of a sample
  bool last_;                  // channels come last
  Rows rows_;
  Planes planes_;
  int64_t parts_, pieces_;  // of a sample; partial sums of a channel in it
  Schedule schedule_;
  Buffer<float> affine_;  // [scale shift mean, channels or lanes]
  Buffer<float> lanes_;   // [threads, sum moment, lanes]
  Buffer<Sums> partial_;  // [samples, pieces, channels]
};

}  // namespace

void map_gradients(GroupNormProblem const& problem, UngroupedGradients const& tensors,
                   int threads) {
  check_gradients(problem, threads);
  check_one_activation(problem);
  if (!prepare(problem, tensors)) return;
  MapGradients(problem, tensors, threads).run();
  if (tensors.grad_front_bias != nullptr && problem.activation_before != Activation::kIdentity) {
    GroupNormProblem sums = problem;
    sums.dtype = problem.output_dtype;
    channel_sums(sums, tensors.grad_input, tensors.grad_front_bias, threads);
  }
}

}  // namespace fusedconv::cpu
