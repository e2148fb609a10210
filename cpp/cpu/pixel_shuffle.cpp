#include "cpu/pixel_shuffle.hpp"

#include <algorithm>
#include <numeric>

#include "cpu/huge_pages.hpp"
#include "cpu/schedule.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::cpu {
namespace {

using conv::AxisProblem;
using conv::TransposedProblem;

// Values of a sum that are added up in registers; longer sums are of such sums.
constexpr int64_t kDepth = 64;
constexpr int kFloat = index_of(DType::kFloat32);

// What both layouts share. A line of the filter is its taps along width at one depth and height.
class PixelShuffle {
 public:
  PixelShuffle(TransposedProblem const& problem, DType dtype, int64_t batch, Activation activation,
               PixelShuffleTensors const& tensors)
      : dtype_(dtype),
        batch_(batch),
        tensors_(tensors),
        channels_(problem.channels),
        outputs_(problem.output_channels),
        depth_(problem.axes[0]),
        height_(problem.axes[1]),
        width_(problem.axes[2]),
        lines_of_filter_(int64_t(depth_.kernel) * height_.kernel),
        pixels_(int64_t(depth_.input) * height_.input * width_.input),
        place_(place_of(Activation::kIdentity, activation)) {}

 protected:
  // Brings weights to where products read them, zeros behind the last: for each line of the filter
  // and `block` of its columns, all input channels' columns. A column is an output channel and a
  // tap along width, of which the one that `taps_first` says are together.
  Buffer<float> packed(int64_t block, bool taps_first, int threads) const {
    int64_t const taps = width_.kernel, columns = outputs_ * taps;
    int64_t const pitch = round_up(columns, block), filter = lines_of_filter_ * pitch;
    int64_t const step = tensors_.weight_strides[taps_first ? 4 : 1];
    int64_t const next = tensors_.weight_strides[taps_first ? 1 : 4];
    int64_t const run = taps_first ? taps : outputs_;
    Buffer<float> to(filter * channels_);
    int64_t const each = std::clamp<int64_t>(kPart / filter, 1, channels_);
    Schedule const schedule(ceil_div(channels_, each), each * filter, 0, 1, threads);
    auto const nothing = [](auto...) {};
    schedule.run(nothing, nothing, [&](int64_t unit, int64_t, int64_t, int64_t) {
      int64_t const last = std::min(channels_, (unit + 1) * each);
      for (int64_t c = unit * each; c < last; ++c) {
        for (int64_t line = 0; line < lines_of_filter_; ++line) {
          float const* from = tensors_.weight + c * tensors_.weight_strides[0] +
                              line / height_.kernel * tensors_.weight_strides[2] +
                              line % height_.kernel * tensors_.weight_strides[3];
          float const* in_run = from;
          int64_t left = run;
          for (int64_t first = 0; first < pitch; first += block) {
            float* const at = to.get() + (line * pitch + first) * channels_ + c * block;
            int64_t const count = std::min(block, columns - first);
            for (int64_t i = 0; i < count;) {
              int64_t const end = i + std::min(left, count - i);
              left -= end - i;
              for (; i < end; ++i, in_run += step) at[i] = *in_run;
              if (left > 0) continue;
              left = run;
              in_run = from += next;
            }
            std::fill(at + count, at + block, 0.0f);
          }
        }
      }
    });
    return to;
  }
  // Calls body(sample, first pixel, pixels, thread) for tiles of a sample's pixels.
  template <class Body>
  void for_each_tile(int64_t pixels, int threads, Body body) const {
    int64_t const tiles = ceil_div(pixels_, pixels);
    int64_t const elements = pixels * outputs_ * lines_of_filter_ * width_.kernel;
    // What is summed counts, not what is stored.
    Schedule const schedule(batch_ * tiles, elements * std::max<int64_t>(1, channels_ / 8), 0, 1,
                            threads);
    auto const nothing = [](auto...) {};
    schedule.run(nothing, nothing, [&](int64_t unit, int64_t, int64_t, int64_t thread) {
      int64_t const first = unit % tiles * pixels;
      body(unit / tiles, first, std::min(pixels, pixels_ - first), thread);
    });
  }
  // Calls body(offset in pixels of the tile, pixels, line of the output, first column of it) for
  // stretches of a tile that lie in one line of the input.
  template <class Body>
  void for_each_stretch(int64_t first, int64_t count, int64_t line_of_filter, Body body) const {
    for (int64_t done = 0; done < count;) {
      int64_t const line = (first + done) / width_.input, column = (first + done) % width_.input;
      int64_t const pixels = std::min(width_.input - column, count - done);
      int64_t const z = line / height_.input * depth_.stride + line_of_filter / height_.kernel;
      int64_t const p = line % height_.input * height_.stride + line_of_filter % height_.kernel;
      body(done, pixels, z * height_.output + p, column * width_.stride);
      done += pixels;
    }
  }

  DType dtype_;
  int64_t batch_;
  PixelShuffleTensors const& tensors_;
  int64_t channels_, outputs_;
  AxisProblem depth_, height_, width_;
  int64_t lines_of_filter_, pixels_;
  int place_;  // of the activation, behind the bias
  ForwardLoops const& forward_ = loops().forward;
  DirectLoops const& direct_ = loops().direct;
  ProductLoops const& products_ = loops().products;
};

// Rows of the product are output channels and taps along width, columns are pixels.
class ChannelsFirst final : PixelShuffle {
 public:
  using PixelShuffle::PixelShuffle;

  void run(int threads) {
    int64_t const taps = width_.kernel, block = products_.columns;
    int64_t const rows = round_up(outputs_ * taps, kProductRows);
    Buffer<float> const weight = packed(kProductRows, true, threads);
    auto const rows_at = [&](int64_t line, int64_t row) {
      return weight.get() + (line * rows + row) * channels_;
    };
    // Rows at a time whose sums stay in cache: whole blocks, and all taps of a channel.
    int64_t const unit = std::lcm(taps, int64_t(kProductRows));
    int64_t const rows_each = std::min(rows, unit * std::max<int64_t>(1, kMostRows / unit));
    int64_t const sums_room = rows_each * kPixels, staged = channels_ * kPixels;
    int64_t const room = staged + sums_room + taps * (kPixels + kRoom) + kRoom;
    Buffer<float> const buffer(threads * room);
    for_each_tile(
        kPixels, threads, [&](int64_t sample, int64_t first, int64_t count, int64_t thread) {
          float* const x = buffer.get() + thread * room;
          float *const sums = x + staged, *const whole = sums + sums_room;
          stage(sample, first, count, x);
          for (int64_t line = 0; line < lines_of_filter_; ++line) {
            for (int64_t row = 0; row < rows; row += rows_each) {
              int64_t const here = std::min(rows_each, rows - row);
              for (int64_t c = 0; c < channels_; c += kDepth) {
                int64_t const depth = std::min(kDepth, channels_ - c);
                for (int64_t r = 0; r < here; r += kProductRows) {
                  for (int64_t at = 0; at < count; at += block) {
                    products_.multiply_packed(rows_at(line, row + r) + c * kProductRows,
                                              x + at * channels_ + c * block, depth,
                                              sums + r * kPixels + at, kPixels, c > 0);
                  }
                }
              }
              int64_t const last = std::min(row + here, outputs_ * taps);
              for (int64_t k = row / taps; k < last / taps; ++k) {
                finish(sample, first, count, line, k, sums + (k * taps - row) * kPixels, whole);
              }
            }
          }
        });
  }

 private:
  static constexpr int64_t kPixels = 64;  // of a tile, blocks of every instruction set
  static constexpr int64_t kMostRows = 48;

  // The tile's pixels of all channels in float32, block by block, zeros behind the last pixel.
  void stage(int64_t sample, int64_t first, int64_t count, float* to) const {
    int64_t const block = products_.columns;
    for (int64_t done = 0; done < count; done += block) {
      int64_t const pixels = std::min(block, count - done);
      for (int64_t c = 0; c < channels_; ++c) {
        float* const line = to + done * channels_ + c * block;
        int64_t const offset = (sample * channels_ + c) * pixels_ + first + done;
        forward_.apply_to_run[index_of(dtype_)][kFloat][0](at(tensors_.input, dtype_, offset), line,
                                                           pixels, 0.0f, 1.0f, 0.0f);
        std::fill(line + pixels, line + block, 0.0f);
      }
    }
  }

  void finish(int64_t sample, int64_t first, int64_t count, int64_t line, int64_t k,
              float const* sums, float* whole) const {
    int64_t const taps = width_.kernel;
    float const* from = sums;
    if (taps > 1) {
      direct_.join(sums, kPixels, taps, count, whole);
      from = whole;
    }
    float const bias = tensors_.bias == nullptr ? 0.0f : tensors_.bias[k];
    int64_t const plane = (sample * outputs_ + k) * depth_.output * height_.output;
    for_each_stretch(first, count, line,
                     [&](int64_t done, int64_t pixels, int64_t output_line, int64_t column) {
                       int64_t const offset = (plane + output_line) * width_.output + column;
                       forward_.apply_to_run[kFloat][index_of(dtype_)][place_](
                           from + done * taps, at(tensors_.output, dtype_, offset), pixels * taps,
                           0.0f, 1.0f, bias);
                     });
  }
};

// Rows of the product are pixels, columns are taps along width and output channels.
class ChannelsLast final : PixelShuffle {
 public:
  using PixelShuffle::PixelShuffle;

  void run(int threads) {
    int64_t const block = products_.columns, lanes = width_.kernel * outputs_;
    int64_t const pitch = round_up(lanes, block);
    Buffer<float> const weight = packed(block, false, threads);
    auto const columns_at = [&](int64_t line, int64_t column) {
      return weight.get() + (line * pitch + column) * channels_;
    };
    Buffer<float> const affine(3 * (lanes + kRoom));
    float *const zeros = affine.get(), *const ones = zeros + lanes + kRoom;
    float* const bias = ones + lanes + kRoom;
    std::fill_n(zeros, lanes + kRoom, 0.0f);
    std::fill_n(ones, lanes + kRoom, 1.0f);
    for (int64_t lane = 0; lane < lanes; ++lane) {
      bias[lane] = tensors_.bias == nullptr ? 0.0f : tensors_.bias[lane % outputs_];
    }
    int64_t const pixels = kProductRows * std::clamp<int64_t>(kSums / pitch, 1, kMostBlocks);
    // Rows of a last block that is not whole are read from room of their own.
    bool const converts = dtype_ != DType::kFloat32;
    int64_t const staged = (converts ? pixels : kProductRows) * channels_ + kRoom;
    int64_t const room = round_up(staged + pixels * pitch + kRoom, kRoom);
    Buffer<float> const buffer(threads * room);
    for_each_tile(
        pixels, threads, [&](int64_t sample, int64_t first, int64_t count, int64_t thread) {
          float* const x = buffer.get() + thread * room;
          float* const sums = x + round_up(staged, kRoom);
          int64_t const offset = (sample * pixels_ + first) * channels_;
          void const* const from = at(tensors_.input, dtype_, offset);
          int64_t const whole = count - count % kProductRows;
          int64_t const read = converts ? 0 : whole;
          forward_.apply_to_run[index_of(dtype_)][kFloat][0](
              at(tensors_.input, dtype_, offset + read * channels_), x, (count - read) * channels_,
              0.0f, 1.0f, 0.0f);
          std::fill(x + (count - read) * channels_,
                    x + round_up(count - read, kProductRows) * channels_, 0.0f);
          for (int64_t line = 0; line < lines_of_filter_; ++line) {
            for (int64_t column = 0; column < pitch; column += block) {
              for (int64_t c = 0; c < channels_; c += kDepth) {
                int64_t const depth = std::min(kDepth, channels_ - c);
                for (int64_t row = 0; row < count; row += kProductRows) {
                  float const* const rows = row < read
                                                ? static_cast<float const*>(from) + row * channels_
                                                : x + (row - read) * channels_;
                  products_.multiply_rows(rows + c, channels_, columns_at(line, column) + c * block,
                                          depth, sums + row * pitch + column, pitch, c > 0);
                }
              }
            }
            finish(sample, first, count, line, sums, pitch, zeros, ones, bias);
          }
        });
  }

 private:
  static constexpr int64_t kSums = 8192, kMostBlocks = 8;

  void finish(int64_t sample, int64_t first, int64_t count, int64_t line, float const* sums,
              int64_t pitch, float const* zeros, float const* ones, float const* bias) const {
    int64_t const lanes = width_.kernel * outputs_;
    int64_t const lines = sample * depth_.output * height_.output;
    auto const apply = forward_.apply_to_rows[kFloat][index_of(dtype_)][place_];
    for_each_stretch(
        first, count, line, [&](int64_t done, int64_t pixels, int64_t output_line, int64_t column) {
          int64_t const offset = ((lines + output_line) * width_.output + column) * outputs_;
          float const* const from = sums + done * pitch;
          if (lanes == pitch) {
            apply(from, at(tensors_.output, dtype_, offset), pixels * lanes, lanes, zeros, ones,
                  bias);
            return;
          }
          for (int64_t pixel = 0; pixel < pixels; ++pixel) {
            apply(from + pixel * pitch, at(tensors_.output, dtype_, offset + pixel * lanes), lanes,
                  lanes, zeros, ones, bias);
          }
        });
  }
};

void check(TransposedProblem const& problem, DType dtype, int64_t batch,
           PixelShuffleTensors const& t, int threads) {
  static constexpr auto kKernel = "pixel_shuffle";
  auto const at_least = [](char const* name, int64_t value, int64_t least) {
    FUSEDCONV_CHECK(value >= least, kKernel, ": ", name, ": got ", value, ", expected at least ",
                    least);
  };
  auto const pointer = [](char const* name, void const* address) {
    FUSEDCONV_CHECK(address != nullptr, kKernel, ": ", name, ": got null");
  };
  at_least("threads", threads, 1);
  at_least("batch", batch, 1);
  at_least("channels", problem.channels, 1);
  at_least("output_channels", problem.output_channels, 1);
  FUSEDCONV_CHECK(problem.groups == 1, kKernel, ": groups: got ", problem.groups, ", expected 1");
  for (AxisProblem const& axis : problem.axes) {
    at_least("input", axis.input, 1);
    at_least("kernel", axis.kernel, 1);
    FUSEDCONV_CHECK(axis.kernel == axis.stride, kKernel, ": kernel: got ", axis.kernel,
                    ", expected the stride, ", axis.stride);
    FUSEDCONV_CHECK(axis.padding == 0, kKernel, ": padding: got ", axis.padding, ", expected 0");
    FUSEDCONV_CHECK(axis.kernel == 1 || axis.dilation == 1, kKernel, ": dilation: got ",
                    axis.dilation, ", expected 1");
    FUSEDCONV_CHECK(int64_t(axis.input) * axis.stride == axis.output, kKernel, ": output: got ",
                    axis.output, ", expected ", int64_t(axis.input) * axis.stride);
  }
  int const code = int(dtype);
  FUSEDCONV_CHECK(code >= 0 && code < kDTypes, kKernel, ": dtype: got code ", code,
                  ", expected 0 to ", kDTypes - 1);
  FUSEDCONV_CHECK(t.weight_strides.size() == 5, kKernel, ": weight_strides: got ",
                  t.weight_strides.size(), ", expected 5");
  pointer("input", t.input);
  pointer("weight", t.weight);
  pointer("output", t.output);
}

}  // namespace

void pixel_shuffle(TransposedProblem const& problem, DType dtype, int64_t batch,
                   Activation activation, PixelShuffleTensors const& tensors, int threads) {
  check(problem, dtype, batch, tensors, threads);
  int64_t elements = batch * problem.output_channels;
  for (AxisProblem const& axis : problem.axes) elements *= axis.output;
  advise_huge_pages(tensors.output, elements * size_of(dtype));
  if (problem.layout == Layout::kChannelsFirst) {
    ChannelsFirst(problem, dtype, batch, activation, tensors).run(threads);
  } else {
    ChannelsLast(problem, dtype, batch, activation, tensors).run(threads);
  }
}

}  // namespace fusedconv::cpu
