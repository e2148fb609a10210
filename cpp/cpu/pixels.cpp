// Blocks of pixels, and their moments about a pivot, the mean of a pixel's first channels, as
// group_norm.cpp takes them.
#include "cpu/pixels.hpp"

#include <algorithm>
#include <cmath>

namespace fusedconv::cpu {
namespace {

constexpr int64_t kBlock = 16384;     // elements of a block, about: 64 KiB of float32
constexpr int64_t kMostPixels = 256;  // of a block
constexpr int64_t kVector = 16;       // pixels of it are whole vectors, if there are so many
constexpr int64_t kHead = 4;          // channels whose mean is the pivot
constexpr int64_t kChannels = 128;    // summed in float32 before double

int64_t pixels_of_block(GroupNormProblem const& problem) {
  int64_t const wanted = std::min(kMostPixels, kBlock / problem.channels);
  return std::min(problem.pixels, std::max(kVector, wanted / kVector * kVector));
}

}  // namespace

PixelBlocks::PixelBlocks(GroupNormProblem const& problem, int64_t run_length, int tiles, int lanes,
                         int threads)
    : problem_(problem),
      pixels_(pixels_of_block(problem)),
      blocks_(ceil_div(problem.pixels, pixels_)),
      run_length_(run_length),
      runs_of_sample_(ceil_div(blocks_, run_length)),
      schedule_(problem.batch * runs_of_sample_, problem.channels * pixels_ * run_length, 0, 1,
                threads),
      number_of_tiles_(tiles),
      number_of_lanes_(lanes + kOwn),
      tile_size_(problem.channels * pixels_ + kRoom),
      tiles_(schedule_.threads() * number_of_tiles_ * tile_size_),
      lanes_(schedule_.threads() * number_of_lanes_ * (pixels_ + kRoom)),
      totals_(schedule_.threads() * 2 * pixels_) {}

void PixelBlocks::read(PixelBlock const& block, void const* tensor, Activation activation, int to,
                       int other) const {
  int64_t const channels = problem_.channels;
  auto* const apply = loops_.apply_to_run[index_of(problem_.dtype)][kFloat]
                                         [place_of(activation, Activation::kIdentity)];
  auto const from = [&](int64_t channel) {
    return at(tensor, problem_.dtype, offset(block, problem_.input_layout, channel));
  };
  float* const x = tile(block, to);
  if (problem_.input_layout == Layout::kChannelsLast) {
    float* const rows = tile(block, other);
    apply(from(0), rows, block.pixels * channels, 0.0f, 1.0f, 0.0f);
    loops_.transpose[kFloat](rows, block.pixels, channels, x, block.pixels);
    return;
  }
  for (int64_t channel = 0; channel < channels; ++channel) {
    apply(from(channel), x + channel * block.pixels, block.pixels, 0.0f, 1.0f, 0.0f);
  }
}

void PixelBlocks::take_moments(PixelBlock const& block, int x, Maps const& maps) const {
  auto* const moments = loops_.moments_of_rows[kFloat][index_of(Activation::kIdentity)];
  float const* const values = tile(block, x);
  float *const pivot = own(block, kPivot), *const sum = own(block, kSum),
               *const square = own(block, kSquare);
  int64_t const channels = problem_.channels, pixels = block.pixels;
  int64_t const head = std::min(kHead, channels);
  std::fill_n(pivot, pixels, 0.0f);
  moments(values, head * pixels, pixels, pivot, sum, square);
  for (int64_t i = 0; i < pixels; ++i) pivot[i] = sum[i] / static_cast<float>(head);
  double* const totals = totals_.get() + block.thread * 2 * pixels_;
  std::fill_n(totals, 2 * pixels, 0.0);
  for (int64_t channel = 0; channel < channels; channel += kChannels) {
    int64_t const count = std::min(kChannels, channels - channel);
    moments(values + channel * pixels, count * pixels, pixels, pivot, sum, square);
    for (int64_t i = 0; i < pixels; ++i) {
      totals[i] += static_cast<double>(sum[i]);
      totals[pixels + i] += static_cast<double>(square[i]);
    }
  }
  double const count = static_cast<double>(channels);
  for (int64_t i = 0; i < pixels; ++i) {
    double const offset = totals[i] / count;
    double const mean = static_cast<double>(pivot[i]) + offset;
    double const variance = std::max(0.0, totals[pixels + i] - offset * totals[i]) / count;
    double const rstd = 1.0 / std::sqrt(variance + problem_.eps);
    maps.mean[i] = static_cast<float>(mean);
    maps.rstd[i] = static_cast<float>(rstd);
    maps.shift[i] = static_cast<float>((static_cast<double>(maps.mean[i]) - mean) * rstd);
  }
}

void PixelBlocks::normalise(PixelBlock const& block, int x, Maps const& maps, int to) const {
  loops_.apply_to_rows[kFloat][kFloat][0](tile(block, x), tile(block, to),
                                          problem_.channels * block.pixels, block.pixels, maps.mean,
                                          maps.rstd, maps.shift);
}

}  // namespace fusedconv::cpu
