#include "conv/sm90/lines/schedule.hpp"

#include <algorithm>
#include <bit>
#include <utility>

#include "conv/upsampled_line.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90::lines {
namespace {

// Over what the tensor cores take for products at full rate; cycles from a tile's products to its
// last store, for each consumer, as all go through the same pipe, and what they are more where four
// outputs are of two positions; of a byte that is copied.
constexpr double kProducts = 1.2;
constexpr double kEpilogue = 1300.0, kNarrow = 400.0;
constexpr double kByte = 0.041;
constexpr int64_t kMostVectors = int64_t(1) << 30;

Schedule refused(std::string reason) {
  Schedule result;
  result.support = Support::no(std::move(reason));
  return result;
}

}  // namespace

Schedule schedule_of(TransposedProblem const& p, Shape const& shape, Math math,
                     Device const& device) {
  if (traits_of(math).element_bytes() != 2) return refused("the row is not of 16 bits");
  if (Support const line = is_upsampled_line(p, kGranule); !line) return refused(line.reason);
  AxisProblem const& axis = p.axes[kMaxAxes - 1];
  int const stride = axis.stride;
  if (stride < 2 || stride > kMostStride || !std::has_single_bit(unsigned(stride))) {
    return refused(detail::join("the stride is ", stride, ", 2, 4, 8 and 16 are served"));
  }
  Schedule s;
  s.axis = Axis::of(axis);
  int const padding = axis.padding;
  // By an odd number one of a pair would be late and the other not, which a stride of two alone
  // has a way for.
  s.rotation = stride == 2 || padding % 2 == 0 ? padding % stride : 0;
  s.base = s.rotation - padding;
  s.row_blocks = int(ceil_div(p.output_channels, s.row_channels()));
  s.chunks = int(ceil_div(p.channels, kChunk));
  // All consumers have rows of their own where there are as many and memory holds them, else tiles.
  int const row_bytes = kTaps * s.chunks * kTileBytes;
  auto const stages_beside = [&](int together) {
    return (device.shared_bytes - kBarrierBytes - together * row_bytes) / kStageBytes;
  };
  bool const shares =
      s.row_blocks >= shape.consumers && stages_beside(shape.consumers) >= kLeastStages;
  s.together = shares ? shape.consumers : 1;
  s.stages = std::min(kMostStages, stages_beside(s.together));
  if (s.stages < kLeastStages) {
    return refused(detail::join("filters of ", p.channels, " channels have no room beside a ring"));
  }
  s.groups = int(ceil_div(s.row_blocks, s.together));
  // Positions from the first with an output to the last.
  int const begin = -s.base / stride, last = (axis.output - 1 - s.base) / stride;
  int const column = begin - kFirstOutput;
  s.first = (column >= 0 ? column : column - (kGranule - 1)) / kGranule * kGranule;
  s.tiles = int(ceil_div(last + 1 - (s.first + kFirstOutput), kOutputs));
  s.channel_pitch = int(round_up(p.channels, 8));
  s.filter_bytes = int64_t(s.groups) * s.together * kTaps * kRows * s.channel_pitch * 2;
  // A thread packs a vector, and counts them all.
  if (s.filter_bytes / 16 > kMostVectors) {
    return refused(detail::join("the packed filter has ", s.filter_bytes, " bytes, up to ",
                                16 * kMostVectors, " are served"));
  }
  s.kept_bytes = s.together * row_bytes;
  s.shared_bytes = s.kept_bytes + s.stages * kStageBytes + kBarrierBytes;
  // Products of consumers follow each other, and each takes up its next tile once it has stored
  // one.
  double const products = kProducts * kTaps * s.chunks * (kChunk / 16) * (kColumns / 2);
  double const turn = products + shape.consumers * (kEpilogue + (stride == 2 ? kNarrow : 0.0));
  s.tile_cycles = std::max(
      {s.together * products, turn * s.together / shape.consumers, kByte * s.chunks * kStageBytes});
  return s;
}

}  // namespace fusedconv::conv::sm90::lines
