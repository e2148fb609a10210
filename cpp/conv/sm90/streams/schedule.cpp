#include "conv/sm90/streams/schedule.hpp"

#include <algorithm>
#include <utility>

#include "conv/upsampled_line.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90::streams {
namespace {

// Cycles of an instruction over those at full rate, and at least, as shared memory has both
// operands to bring; from a tile's products to the next one's, and by the square of a block's
// columns.
constexpr double kProducts = 1.03;
constexpr double kLeastProducts = 84.0;
constexpr double kEpilogue = 1420.0, kSquare = 0.0963;
constexpr int64_t kMostElements = int64_t(1) << 30;

Schedule refused(std::string reason) {
  Schedule result;
  result.support = Support::no(std::move(reason));
  return result;
}

}  // namespace

Schedule schedule_of(TransposedProblem const& p, Shape const& shape, Math math,
                     Device const& device) {
  if (math != Math::kTf32) return refused("the row is not of TF32");
  if (Support const line = is_upsampled_line(p, kGranule); !line) return refused(line.reason);
  AxisProblem const& axis = p.axes[kMaxAxes - 1];
  int const stride = axis.stride;
  if (stride < 2 || stride > kMostStride) {
    return refused(detail::join("the stride is ", stride, ", 2 to ", kMostStride, " are served"));
  }
  int64_t const inputs = int64_t(p.channels) * axis.input;
  // Of tiles that reach beyond a line too.
  int64_t const reach = axis.output + 2 * int64_t(axis.padding) + 2 * kTile * int64_t(stride);
  int64_t const outputs = p.output_channels * reach;
  if (std::max(inputs, outputs) > kMostElements) {
    return refused(detail::join("a sample has ", inputs, " elements of input and ", outputs,
                                " of output and its tiles, up to ", kMostElements, " are served"));
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
  if (s.filter_bytes / 16 > kMostElements) {
    return refused(detail::join("the packed filter has ", s.filter_bytes, " bytes, up to ",
                                16 * kMostElements, " are served"));
  }
  s.shared_bytes = s.stages * shape.stage_bytes() + beside;
  double const each = std::max(kProducts * shape.columns / 2.0, kLeastProducts);
  double const products = each * s.chunks * (kChunk / kStep) * kTaps * kConsumers;
  s.tile_cycles = products + kEpilogue + kSquare * shape.columns * shape.columns;
  return s;
}

}  // namespace fusedconv::conv::sm90::streams
