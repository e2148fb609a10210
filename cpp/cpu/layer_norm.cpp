// LayerNorm over channels for processors. A block of pixels with all their channels is brought to
// float32 and activated in cache, channel by channel, whichever layout it comes in: there pixels
// are the lanes of vectors. Their moments are taken about a pivot, the mean of a pixel's first
// channels, as group_norm.cpp does; then the block is normalised, mapped by channel, activated and
// written.
#include "cpu/layer_norm.hpp"

#include <algorithm>
#include <cmath>

#include "cpu/schedule.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::cpu {
namespace {

constexpr int64_t kBlock = 16384;     // elements of a block, about: 64 KiB of float32
constexpr int64_t kMostPixels = 256;  // of a block
constexpr int64_t kVector = 16;       // pixels of it are whole vectors, if there are so many
constexpr int64_t kPivot = 4;         // channels whose mean is the pivot
constexpr int64_t kChannels = 128;    // summed in float32 before double

// (x - mean) * rstd + shift, of one pixel; the shift is what rounding took off the mean.
struct PixelMap {
  float mean, rstd, shift;

  PixelMap(double pivot, double sum, double square, double count, double eps) {
    double const offset = sum / count;
    double const exact = pivot + offset;
    double const deviation = 1.0 / std::sqrt(std::max(0.0, square - offset * sum) / count + eps);
    mean = static_cast<float>(exact);
    rstd = static_cast<float>(deviation);
    shift = static_cast<float>((static_cast<double>(mean) - exact) * deviation);
  }
};

class LayerNorm {
 public:
  LayerNorm(GroupNormProblem const& problem, GroupNormTensors const& tensors, int threads)
      : problem_(problem),
        tensors_(tensors),
        channels_(problem.channels),
        block_pixels_(pixels_of_block(problem)),
        blocks_(ceil_div(problem.pixels, block_pixels_)),
        schedule_(problem.batch * blocks_, channels_ * block_pixels_, 0, 1, threads),
        block_size_(channels_ * block_pixels_ + kRoom),
        tiles_(schedule_.threads() * 2 * block_size_),
        lanes_(schedule_.threads() * 6 * (block_pixels_ + kRoom)),
        totals_(schedule_.threads() * 2 * block_pixels_),
        affine_(2 * channels_) {
    read_affine(problem.affine_dtype, tensors.weight, channels_, 1.0f, weight());
    read_affine(problem.affine_dtype, tensors.bias, channels_, 0.0f, bias());
  }

  void run() {
    auto const nothing = [](auto...) {};
    schedule_.run(nothing, nothing, [this](int64_t unit, int64_t, int64_t, int64_t thread) {
      int64_t const first = unit % blocks_ * block_pixels_;
      Block const block{.sample = unit / blocks_,
                        .first = first,
                        .pixels = std::min(block_pixels_, problem_.pixels - first),
                        .thread = thread};
      read(block);
      take_moments(block);
      write(block);
    });
  }

 private:
  static constexpr int kFloat = index_of(DType::kFloat32);

  struct Block {
    int64_t sample, first, pixels, thread;
  };

  static int64_t pixels_of_block(GroupNormProblem const& problem) {
    int64_t const wanted = std::min(kMostPixels, kBlock / problem.channels);
    return std::min(problem.pixels, std::max(kVector, wanted / kVector * kVector));
  }

  float* weight() const { return affine_.get(); }
  float* bias() const { return weight() + channels_; }
  // Of [channels, pixels] or, on the way from or to channels last, [pixels, channels].
  float* tile(Block const& block, int number) const {
    return tiles_.get() + (block.thread * 2 + number) * block_size_;
  }
  enum Lanes { kPivots, kSums, kSquares, kMeans, kRstds, kShifts };
  float* lanes(Block const& block, Lanes which) const {
    return lanes_.get() + (block.thread * 6 + which) * (block_pixels_ + kRoom);
  }
  // Of a block's first pixel: where a layout has that of a channel.
  int64_t offset(Block const& block, Layout layout, int64_t channel) const {
    return layout == Layout::kChannelsLast
               ? (block.sample * problem_.pixels + block.first) * channels_ + channel
               : (block.sample * channels_ + channel) * problem_.pixels + block.first;
  }

  // Activated, in float32, into tile 1.
  void read(Block const& block) const {
    Layout const layout = problem_.input_layout;
    auto* const apply = loops_.apply_to_run[index_of(problem_.dtype)][kFloat][place_of(
        problem_.activation_before, Activation::kIdentity)];
    auto const from = [&](int64_t channel) {
      return at(tensors_.input, problem_.dtype, offset(block, layout, channel));
    };
    float* const x = tile(block, 1);
    if (layout == Layout::kChannelsLast) {
      float* const rows = tile(block, 0);
      apply(from(0), rows, block.pixels * channels_, 0.0f, 1.0f, 0.0f);
      loops_.transpose[kFloat](rows, block.pixels, channels_, x, block.pixels);
      return;
    }
    for (int64_t channel = 0; channel < channels_; ++channel) {
      apply(from(channel), x + channel * block.pixels, block.pixels, 0.0f, 1.0f, 0.0f);
    }
  }

  // Of tile 1, into the pixels' means, reciprocal deviations and shifts.
  void take_moments(Block const& block) const {
    auto* const moments = loops_.moments_of_rows[kFloat][index_of(Activation::kIdentity)];
    float const* const x = tile(block, 1);
    float *const pivot = lanes(block, kPivots), *const sum = lanes(block, kSums),
                 *const square = lanes(block, kSquares);
    int64_t const pixels = block.pixels, head = std::min(kPivot, channels_);
    std::fill_n(pivot, pixels, 0.0f);
    moments(x, head * pixels, pixels, pivot, sum, square);
    for (int64_t i = 0; i < pixels; ++i) pivot[i] = sum[i] / static_cast<float>(head);
    double* const totals = totals_.get() + block.thread * 2 * block_pixels_;
    std::fill_n(totals, 2 * pixels, 0.0);
    for (int64_t channel = 0; channel < channels_; channel += kChannels) {
      int64_t const count = std::min(kChannels, channels_ - channel);
      moments(x + channel * pixels, count * pixels, pixels, pivot, sum, square);
      for (int64_t i = 0; i < pixels; ++i) {
        totals[i] += static_cast<double>(sum[i]);
        totals[pixels + i] += static_cast<double>(square[i]);
      }
    }
    for (int64_t i = 0; i < pixels; ++i) {
      PixelMap const map(static_cast<double>(pivot[i]), totals[i], totals[pixels + i],
                         static_cast<double>(channels_), problem_.eps);
      lanes(block, kMeans)[i] = map.mean;
      lanes(block, kRstds)[i] = map.rstd;
      lanes(block, kShifts)[i] = map.shift;
    }
  }

  // Normalised, mapped and activated, from tile 1 into the output.
  void write(Block const& block) const {
    int64_t const pixels = block.pixels;
    float *const x = tile(block, 1), *const normalised = tile(block, 0);
    loops_.apply_to_rows[kFloat][kFloat][0](x, normalised, channels_ * pixels, pixels,
                                            lanes(block, kMeans), lanes(block, kRstds),
                                            lanes(block, kShifts));
    Layout const layout = problem_.output_layout;
    int const dtype = index_of(problem_.output_dtype);
    auto const to = [&](int64_t channel) {
      return at(tensors_.output, problem_.output_dtype, offset(block, layout, channel));
    };
    bool const last = layout == Layout::kChannelsLast;
    auto* const apply = loops_.apply_to_run[kFloat][last ? kFloat : dtype][place_of(
        Activation::kIdentity, problem_.activation_after)];
    for (int64_t channel = 0; channel < channels_; ++channel) {
      apply(normalised + channel * pixels, last ? x + channel * pixels : to(channel), pixels, 0.0f,
            weight()[channel], bias()[channel]);
    }
    if (last) loops_.transpose[dtype](x, channels_, pixels, to(0), channels_);
  }

  GroupNormProblem const& problem_;
  GroupNormTensors const& tensors_;
  ForwardLoops const& loops_ = loops().forward;
  int64_t channels_;
  int64_t block_pixels_, blocks_;
  Schedule schedule_;
  int64_t block_size_;
  Buffer<float> tiles_;    // [threads, 2, block]
  Buffer<float> lanes_;    // [threads, Lanes, pixels of a block]
  Buffer<double> totals_;  // [threads, sum square, pixels of a block]
  Buffer<float> affine_;   // [weight bias, channels]
};

}  // namespace

void layer_norm(GroupNormProblem const& problem, GroupNormTensors const& tensors, int threads) {
  check(problem, threads);
  check_dtypes(problem);
  if (is_empty(problem)) return;
  prepare_output(problem, tensors);
  LayerNorm(problem, tensors, threads).run();
}

}  // namespace fusedconv::cpu
