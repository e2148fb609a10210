#include "conv/sm90/streams/schedule.hpp"

#include <algorithm>
#include <utility>

#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90::streams {
namespace {

// Cycles of an instruction over those at full rate, and at least, as shared memory has both
// operands to bring; from a tile's products to the next one's, and by the square of a block's
// columns.
constexpr double kProducts = 1.03;
constexpr double kLeastProducts = 84.0;
constexpr double kEpilogue = 1420.0, kSquare = 0.0963;
constexpr int64_t kMostPixels = int64_t(1) << 30;

Schedule refused(std::string reason) {
  Schedule result;
  result.support = Support::no(std::move(reason));
  return result;
}

}  // namespace

Schedule schedule_of(TransposedProblem const& p, Shape const& shape, Math math,
                     Device const& device) {
  if (math != Math::kTf32) return refused("the row is not of TF32");
  if (p.layout != Layout::kChannelsFirst) return refused("the layout is channels last");
  if (p.groups != 1) return refused("the convolution has groups");
  if (!p.aligned) return refused("the input begins at no multiple of 16 bytes");
  for (int a = 0; a < kMaxAxes - 1; ++a) {
    AxisProblem const& other = p.axes[a];
    // Padding may keep the one product of such an axis off its one output.
    if (other.input != 1 || other.output != 1 || other.kernel != 1 || other.padding != 0) {
      return refused("the convolution has more than one axis");
    }
  }
  AxisProblem const& axis = p.axes[kMaxAxes - 1];
  int const stride = axis.stride;
  if (stride < 2 || stride > kMostStride) {
    return refused(detail::join("the stride is ", stride, ", 2 to ", kMostStride, " are served"));
  }
  if (axis.dilation != 1) return refused("the filter is dilated");
  if (axis.kernel <= stride || axis.kernel > kTaps * stride) {
    return refused(detail::join("the filter has ", axis.kernel, " taps, more than the stride ",
                                stride, " and up to two are served"));
  }
  if (axis.input % kGranule != 0) {
    return refused(detail::join("lines of ", axis.input, " positions are no whole 16 bytes"));
  }
  if (p.channels < 1 || p.output_channels < 1 || axis.input < 1 || axis.output < 1) {
    return refused("the input or the output is empty");
  }
  int64_t const inputs = int64_t(p.channels) * axis.input;
  int64_t const outputs = int64_t(p.output_channels) * (int64_t(axis.output) + 2 * stride);
  if (std::max(inputs, outputs) > kMostPixels) {
    return refused(detail::join("a sample has ", std::max(inputs, outputs), " elements, up to ",
                                kMostPixels, " are served"));
  }
  Schedule s;
  s.groups = int(ceil_div(int64_t(p.output_channels) * stride, shape.columns));
  s.chunks = int(ceil_div(p.channels, kChunk));
  int const beside = kBarrierBytes + shape.columns * kColumnBytes;
  s.stages = std::min(kMostStages, (device.shared_bytes - beside) / shape.stage_bytes());
  if (s.stages < kLeastStages) return refused("shared memory has no room for a ring");
  // Positions from the first with an output to the last.
  int const begin = axis.padding / stride, last = (axis.output - 1 + axis.padding) / stride;
  s.first = begin / kGranule * kGranule;
  s.tiles = int(ceil_div(last + 1 - s.first, kTile));
  s.filter_bytes = int64_t(s.groups) * s.chunks * shape.filter_bytes();
  // A thread packs a vector, and counts them all.
  if (s.filter_bytes / 16 > kMostPixels) {
    return refused(detail::join("the packed filter has ", s.filter_bytes, " bytes, up to ",
                                16 * kMostPixels, " are served"));
  }
  s.shared_bytes = s.stages * shape.stage_bytes() + beside;
  double const each = std::max(kProducts * shape.columns / 2.0, kLeastProducts);
  double const products = each * s.chunks * (kChunk / kStep) * kTaps * kConsumers;
  s.tile_cycles = products + kEpilogue + kSquare * shape.columns * shape.columns;
  return s;
}

}  // namespace fusedconv::conv::sm90::streams
