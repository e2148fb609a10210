// The gradients of LayerNorm over channels for processors: a block of pixels is activated and
// normalised anew in cache; there the sums of a pixel over its channels, and what they say of each
// of its elements. Sums by channel are taken a run of blocks at a time, and those in double in the
// order of the runs.
#include <algorithm>

#include "cpu/huge_pages.hpp"
#include "cpu/pixels.hpp"
#include "cpu/ungrouped_gradients.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::cpu {
namespace {

constexpr int64_t kRun = 4;     // blocks
constexpr int64_t kTerms = 16;  // channels summed before their sum is added to a pixel's

class LayerNormGradients {
 public:
  LayerNormGradients(GroupNormProblem const& problem, UngroupedGradients const& tensors,
                     int threads)
      : problem_(problem),
        tensors_(tensors),
        channels_(problem.channels),
        blocks_(problem, kRun, kTiles, kLanes, threads),
        sums_(blocks_.threads() * channels_ * kSums * kRoom),
        partial_(blocks_.runs() * kSums * channels_),
        affine_(2 * channels_) {
    read_affine(problem.affine_dtype, tensors.weight, channels_, 1.0f, weight());
    read_affine(problem.affine_dtype, tensors.bias, channels_, 0.0f, bias());
    std::fill_n(sums_.get(), blocks_.threads() * channels_ * kSums * kRoom, 0.0f);
  }

  void run() const {
    blocks_.run(
        [this](PixelBlock const& block, int64_t) {
          normalise(block);
          sum(block);
          if (tensors_.grad_input != nullptr) differentiate(block);
        },
        [this](int64_t run, int64_t thread) { keep_sums(run, thread); });
    float* const results[kSums] = {tensors_.grad_bias, tensors_.grad_weight,
                                   tensors_.grad_front_bias};
    for (int number = 0; number < kSums; ++number) {
      if (results[number] == nullptr) continue;
      for (int64_t channel = 0; channel < channels_; ++channel) {
        double total = 0.0;
        for (int64_t run = 0; run < blocks_.runs(); ++run) total += partial(run, number, channel);
        results[number][channel] = static_cast<float>(total);
      }
    }
  }

 private:
  static constexpr int kFloat = index_of(DType::kFloat32);
  enum { kInput, kActivated, kNormalised, kGradient, kTiles };
  enum { kMeans, kRstds, kShifts, kOffset, kSlope, kOffsetTerms, kSlopeTerms, kLanes };
  // Of a channel: of g, of g h, of the input's gradient.
  enum { kSums = 3 };

  float* weight() const { return affine_.get(); }
  float* bias() const { return weight() + channels_; }
  float* sums_of(int64_t thread, int64_t channel) const {
    return sums_.get() + (thread * channels_ + channel) * kSums * kRoom;
  }
  double& partial(int64_t run, int64_t number, int64_t channel) const {
    return partial_[(run * kSums + number) * channels_ + channel];
  }

  void normalise(PixelBlock const& block) const {
    Activation const before = problem_.activation_before;
    blocks_.read(block, tensors_.input, before, kActivated, kNormalised);
    if (before != Activation::kIdentity && tensors_.grad_input != nullptr) {
      blocks_.read(block, tensors_.input, Activation::kIdentity, kInput, kNormalised);
    }
    PixelBlocks::Maps const maps{blocks_.lanes(block, kMeans), blocks_.lanes(block, kRstds),
                                 blocks_.lanes(block, kShifts)};
    blocks_.take_moments(block, kActivated, maps);
    blocks_.normalise(block, kActivated, maps, kNormalised);
    blocks_.read(block, tensors_.grad_output, Activation::kIdentity, kGradient, kActivated);
  }

  // g in place of the output's gradient; its sums by channel, and the means by pixel.
  void sum(PixelBlock const& block) const {
    auto* const loop = loops_.pixel_sums_of_run[index_of(problem_.activation_after)];
    int64_t const pixels = block.pixels;
    float const* const h = blocks_.tile(block, kNormalised);
    float* const grad = blocks_.tile(block, kGradient);
    float *const offset = blocks_.lanes(block, kOffset), *const slope =
                                                             blocks_.lanes(block, kSlope);
    float *const offset_terms = blocks_.lanes(block, kOffsetTerms), *const slope_terms =
                                                                        blocks_.lanes(block,
                                                                                      kSlopeTerms);
    std::fill_n(offset, pixels, 0.0f);
    std::fill_n(slope, pixels, 0.0f);
    for (int64_t first = 0; first < channels_; first += kTerms) {
      std::fill_n(offset_terms, pixels, 0.0f);
      std::fill_n(slope_terms, pixels, 0.0f);
      int64_t const end = std::min(channels_, first + kTerms);
      for (int64_t channel = first; channel < end; ++channel) {
        loop(h + channel * pixels, grad + channel * pixels, pixels, weight()[channel],
             bias()[channel], offset_terms, slope_terms, sums_of(block.thread, channel));
      }
      for (int64_t i = 0; i < pixels; ++i) offset[i] += offset_terms[i];
      for (int64_t i = 0; i < pixels; ++i) slope[i] += slope_terms[i];
    }
    float const count = static_cast<float>(channels_);
    for (int64_t i = 0; i < pixels; ++i) offset[i] /= count;
    for (int64_t i = 0; i < pixels; ++i) slope[i] /= count;
  }

  void differentiate(PixelBlock const& block) const {
    Layout const layout = problem_.input_layout;
    bool const last = layout == Layout::kChannelsLast;
    int const dtype = index_of(problem_.output_dtype);
    auto* const loop =
        loops_.pixel_gradient_of_run[last ? kFloat : dtype][index_of(problem_.activation_before)];
    int64_t const pixels = block.pixels;
    float const* const g = blocks_.tile(block, kGradient);
    float const* const h = blocks_.tile(block, kNormalised);
    float const* const x = blocks_.tile(block, kInput);
    float* const result = blocks_.tile(block, kActivated);
    auto const to = [&](int64_t channel) {
      return at(tensors_.grad_input, problem_.output_dtype, blocks_.offset(block, layout, channel));
    };
    for (int64_t channel = 0; channel < channels_; ++channel) {
      int64_t const row = channel * pixels;
      loop(g + row, h + row, x + row, last ? result + row : to(channel), pixels, weight()[channel],
           blocks_.lanes(block, kOffset), blocks_.lanes(block, kSlope),
           blocks_.lanes(block, kRstds), sums_of(block.thread, channel) + 2 * kRoom);
    }
    if (last) loops().forward.transpose[dtype](result, channels_, pixels, to(0), channels_);
  }

  // Of a run that is done; the next begins with zeros.
  void keep_sums(int64_t run, int64_t thread) const {
    for (int64_t channel = 0; channel < channels_; ++channel) {
      float* const sums = sums_of(thread, channel);
      for (int number = 0; number < kSums; ++number) {
        double total = 0.0;
        for (int64_t lane = 0; lane < kRoom; ++lane) {
          total += static_cast<double>(sums[number * kRoom + lane]);
        }
        partial(run, number, channel) = total;
      }
      std::fill_n(sums, kSums * kRoom, 0.0f);
    }
  }

  GroupNormProblem const& problem_;
  UngroupedGradients const& tensors_;
  BackwardLoops const& loops_ = loops().backward;
  int64_t channels_;
  PixelBlocks blocks_;
  Buffer<float> sums_;      // [threads, channels, sums, lanes of a vector]
  Buffer<double> partial_;  // [runs, sums, channels]
  Buffer<float> affine_;    // [weight bias, channels]
};

}  // namespace

bool prepare(GroupNormProblem const& problem, UngroupedGradients const& tensors) {
  FUSEDCONV_CHECK(tensors.grad_front_bias == nullptr || tensors.grad_input != nullptr,
                  "grad_input: got null, expected a tensor whose sums are wanted");
  if (is_empty(problem)) {
    for (float* const grad : {tensors.grad_weight, tensors.grad_bias, tensors.grad_front_bias}) {
      if (grad != nullptr) std::fill_n(grad, problem.channels, 0.0f);
    }
    return false;
  }
  FUSEDCONV_CHECK(tensors.grad_output != nullptr, "grad_output: got null");
  FUSEDCONV_CHECK(tensors.input != nullptr, "input: got null");
  if (tensors.grad_input != nullptr) {
    advise_huge_pages(tensors.grad_input, problem.batch * problem.channels * problem.pixels *
                                              size_of(problem.output_dtype));
  }
  return true;
}

void layer_norm_gradients(GroupNormProblem const& problem, UngroupedGradients const& tensors,
                          int threads) {
  check_gradients(problem, threads);
  if (prepare(problem, tensors)) LayerNormGradients(problem, tensors, threads).run();
}

}  // namespace fusedconv::cpu
