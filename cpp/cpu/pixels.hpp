// Statistics over the channels of each pixel on processors: a block of pixels with all their
// channels lies in cache in float32, channel by channel, whichever layout it comes in, so that
// pixels are the lanes of vectors.
#pragma once

#include <cstdint>

#include "cpu/schedule.hpp"
#include "fusedconv/groupnorm.hpp"

namespace fusedconv::cpu {

struct PixelBlock {
  int64_t sample, first, pixels, thread;
};

// A problem's pixels in blocks, dealt to threads in runs of `run_length`, with `tiles` tiles and
// `lanes` arrays of one float a pixel for each thread.
class PixelBlocks {
 public:
  PixelBlocks(GroupNormProblem const& problem, int64_t run_length, int tiles, int lanes,
              int threads);

  int64_t threads() const { return schedule_.threads(); }
  int64_t runs() const { return problem_.batch * runs_of_sample_; }

  // Calls block(PixelBlock, run) for each block of a run, then after(run, thread).
  template <class OfBlock, class After>
  void run(OfBlock of_block, After after) const {
    auto const nothing = [](auto...) {};
    schedule_.run(nothing, nothing, [&](int64_t run, int64_t, int64_t, int64_t thread) {
      int64_t const begin = run % runs_of_sample_ * run_length_;
      for (int64_t i = begin; i < std::min(begin + run_length_, blocks_); ++i) {
        int64_t const first = i * pixels_;
        of_block(PixelBlock{.sample = run / runs_of_sample_,
                            .first = first,
                            .pixels = std::min(pixels_, problem_.pixels - first),
                            .thread = thread},
                 run);
      }
      after(run, thread);
    });
  }

  // Of [channels, pixels] or, on the way from or to channels last, [pixels, channels].
  float* tile(PixelBlock const& block, int number) const {
    return tiles_.get() + (block.thread * number_of_tiles_ + number) * tile_size_;
  }
  float* lanes(PixelBlock const& block, int number) const {
    return lanes_.get() + (block.thread * number_of_lanes_ + number) * (pixels_ + kRoom);
  }
  // Of a block's first pixel: where a layout has that of a channel.
  int64_t offset(PixelBlock const& block, Layout layout, int64_t channel) const {
    return layout == Layout::kChannelsLast
               ? (block.sample * problem_.pixels + block.first) * problem_.channels + channel
               : (block.sample * problem_.channels + channel) * problem_.pixels + block.first;
  }

  // A tensor of the problem's dtype and input layout, activated, into tile `to`; tile `other` is
  // overwritten where channels come last.
  void read(PixelBlock const& block, void const* tensor, Activation activation, int to,
            int other) const;

  // What (x - mean) * rstd + shift normalises a pixel by; the shift is what rounding took off the
  // mean.
  struct Maps {
    float *mean, *rstd, *shift;
  };
  // Of tile `x`, into the arrays that `maps` names.
  void take_moments(PixelBlock const& block, int x, Maps const& maps) const;
  // Tile `x` normalised, into another one.
  void normalise(PixelBlock const& block, int x, Maps const& maps, int to) const;

 private:
  static constexpr int kFloat = index_of(DType::kFloat32);
  enum Own { kPivot, kSum, kSquare, kOwn };

  float* own(PixelBlock const& block, Own which) const {
    return lanes(block, number_of_lanes_ - kOwn + which);
  }

  GroupNormProblem const& problem_;
  ForwardLoops const& loops_ = loops().forward;
  int64_t pixels_, blocks_;  // pixels of a block, blocks of a sample
  int64_t run_length_, runs_of_sample_;
  Schedule schedule_;
  int64_t number_of_tiles_, number_of_lanes_, tile_size_;
  Buffer<float> tiles_;    // [threads, tiles, tile size]
  Buffer<float> lanes_;    // [threads, lanes, pixels of a block]
  Buffer<double> totals_;  // [threads, sum square, pixels of a block]
};

}  // namespace fusedconv::cpu
