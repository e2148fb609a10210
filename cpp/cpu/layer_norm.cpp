// LayerNorm over channels for processors: a block of pixels is activated, normalised, mapped by
// channel, activated and written while it lies in cache.
#include "cpu/layer_norm.hpp"

#include "cpu/pixels.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::cpu {
namespace {

class LayerNorm {
 public:
  LayerNorm(GroupNormProblem const& problem, GroupNormTensors const& tensors, int threads)
      : problem_(problem),
        tensors_(tensors),
        channels_(problem.channels),
        blocks_(problem, 1, kTiles, kLanes, threads),
        affine_(2 * channels_) {
    read_affine(problem.affine_dtype, tensors.weight, channels_, 1.0f, weight());
    read_affine(problem.affine_dtype, tensors.bias, channels_, 0.0f, bias());
  }

  void run() const {
    blocks_.run(
        [this](PixelBlock const& block, int64_t) {
          PixelBlocks::Maps const maps{blocks_.lanes(block, kMeans), blocks_.lanes(block, kRstds),
                                       blocks_.lanes(block, kShifts)};
          blocks_.read(block, tensors_.input, problem_.activation_before, kInput, kNormalised);
          blocks_.take_moments(block, kInput, maps);
          blocks_.normalise(block, kInput, maps, kNormalised);
          write(block);
        },
        [](auto...) {});
  }

 private:
  static constexpr int kFloat = index_of(DType::kFloat32);
  enum { kInput, kNormalised, kTiles };
  enum { kMeans, kRstds, kShifts, kLanes };

  float* weight() const { return affine_.get(); }
  float* bias() const { return weight() + channels_; }

  // Mapped and activated, into the output.
  void write(PixelBlock const& block) const {
    int64_t const pixels = block.pixels;
    float *const x = blocks_.tile(block, kInput), *const normalised =
                                                      blocks_.tile(block, kNormalised);
    Layout const layout = problem_.output_layout;
    int const dtype = index_of(problem_.output_dtype);
    auto const to = [&](int64_t channel) {
      return at(tensors_.output, problem_.output_dtype, blocks_.offset(block, layout, channel));
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
  PixelBlocks blocks_;
  Buffer<float> affine_;  // [weight bias, channels]
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
