// Sums for processors, part by part in float32 vectors, then in double in the order of the parts.
#include "cpu/channel_sums.hpp"

#include <algorithm>

#include "cpu/schedule.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::cpu {
namespace {

class ChannelSums {
 public:
  ChannelSums(GroupNormProblem const& problem, void const* input, int threads)
      : problem_(problem),
        input_(input),
        channels_(problem.channels),
        length_(problem.channels * problem.pixels),
        last_(problem.input_layout == Layout::kChannelsLast || problem.pixels == 1),
        rows_(channels_, length_),
        planes_(channels_, problem.pixels),
        parts_(last_ ? rows_.parts : planes_.parts),
        schedule_(problem.batch * parts_, ceil_div(length_, parts_), 0, 1, threads),
        lanes_(schedule_.threads() * 3 * (rows_.lanes + kRoom)),
        partial_(last_ ? problem.batch * parts_ * channels_
                       : problem.batch * channels_ * planes_.pieces) {}

  void run(float* sums) const {
    auto const nothing = [](auto...) {};
    schedule_.run(nothing, nothing, [this](int64_t unit, int64_t, int64_t, int64_t thread) {
      last_ ? sum_rows(unit, thread) : sum_planes(unit);
    });
    Buffer<double> const totals(channels_);
    std::fill_n(totals.get(), channels_, 0.0);
    int64_t const terms = last_ ? problem_.batch * parts_ : problem_.batch;
    int64_t const pieces = last_ ? 1 : planes_.pieces;
    double const* partial = partial_.get();
    for (int64_t term = 0; term < terms; ++term) {
      for (int64_t channel = 0; channel < channels_; ++channel) {
        for (int64_t piece = 0; piece < pieces; ++piece) totals[channel] += *partial++;
      }
    }
    for (int64_t channel = 0; channel < channels_; ++channel) {
      sums[channel] = static_cast<float>(totals[channel]);
    }
  }

 private:
  void sum_rows(int64_t unit, int64_t thread) const {
    int64_t const sample = unit / parts_, begin = unit % parts_ * rows_.elements_of_part;
    int64_t const count = std::min(rows_.elements_of_part, length_ - begin);
    float* const pivot = lanes_.get() + thread * 3 * (rows_.lanes + kRoom);
    float* const sum = pivot + rows_.lanes + kRoom;
    float* const square = sum + rows_.lanes + kRoom;
    std::fill_n(pivot, rows_.lanes, 0.0f);
    loops_.moments_of_rows[index_of(problem_.dtype)][0](
        at(input_, problem_.dtype, sample * length_ + begin), count, rows_.lanes, pivot, sum,
        square);
    double* const to = partial_.get() + unit * channels_;
    std::fill_n(to, channels_, 0.0);
    for (int64_t lane = 0; lane < rows_.lanes; lane += channels_) {
      for (int64_t i = 0; i < channels_; ++i) to[i] += static_cast<double>(sum[lane + i]);
    }
  }

  void sum_planes(int64_t unit) const {
    int64_t const sample = unit / parts_;
    planes_.for_each(unit % parts_, channels_, problem_.pixels,
                     [&](int64_t plane, int64_t first, int64_t count, int64_t piece) {
                       int64_t const from = sample * channels_ + plane;
                       double sums[2] = {};
                       loops_.moments_of_run[index_of(problem_.dtype)][0](
                           at(input_, problem_.dtype, from * problem_.pixels + first), count, 0.0f,
                           sums);
                       partial_[from * planes_.pieces + piece] = sums[0];
                     });
  }

  GroupNormProblem const& problem_;
  void const* input_;
  ForwardLoops const& loops_ = loops().forward;
  int64_t channels_, length_;  // of a sample
  bool last_;                  // channels come last
  Rows rows_;
  Planes planes_;
  int64_t parts_;  // of a sample
  Schedule schedule_;
  Buffer<float> lanes_;     // [threads, pivot sum square, lanes]
  Buffer<double> partial_;  // [samples, parts, channels] or [samples, channels, pieces]
};

}  // namespace

void channel_sums(GroupNormProblem const& problem, void const* input, float* sums, int threads) {
  check(problem, threads);
  FUSEDCONV_CHECK(sums != nullptr || problem.channels == 0, "sums: got null");
  if (is_empty(problem)) {
    std::fill_n(sums, problem.channels, 0.0f);
    return;
  }
  FUSEDCONV_CHECK(input != nullptr, "input: got null");
  ChannelSums(problem, input, threads).run(sums);
}

}  // namespace fusedconv::cpu
