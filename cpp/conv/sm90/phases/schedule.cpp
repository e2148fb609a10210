#include "conv/sm90/phases/schedule.hpp"

#include <algorithm>
#include <utility>

#include "conv/sm90/phases/values.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90::phases {
namespace {

constexpr int64_t kMostPixels = int64_t(1) << 30;
constexpr int kMostChannels = 1 << 12;  // far beyond those whose filters shared memory holds
// Bytes that the tensor cores read of shared memory a cycle.
constexpr double kSharedRate = 128.0;

Schedule refused(std::string reason) {
  Schedule result;
  result.support = Support::no(std::move(reason));
  return result;
}

// Of the products of 16 channels for a tile: those that read both operands more slowly than the
// tensor cores multiply take as long.
double step_cycles(Shape const& shape) {
  double const read = (kRows + shape.channels) * kStepChannels * 2 / kSharedRate;
  return shape.taps() * std::max(shape.channels / 2.0, read);
}

}  // namespace

Schedule schedule_of(TransposedProblem const& p, Shape const& shape, Math math,
                     Device const& device) {
  if (traits_of(math).element_bytes() != 2) return refused("the row is not of 16 bits");
  if (p.layout != Layout::kChannelsLast) return refused("the layout is channels first");
  if (p.groups != 1) return refused("the convolution has groups");
  if (!p.aligned) return refused("the input begins at no multiple of 16 bytes");
  bool const deep = shape.axes == kMaxAxes;
  if (!is_doubled(p.axes[1]) || !is_doubled(p.axes[2]) ||
      !(deep ? is_doubled(p.axes[0]) : is_absent(p.axes[0]))) {
    return refused(detail::join("served are filters of 3 taps with stride 2, dilation 1 and odd ",
                                "padding along ", shape.axes, " axes"));
  }
  if (p.channels < 1 || p.output_channels < 1) return refused("there are no channels");
  if (p.channels % kVector != 0 || p.output_channels % kVector != 0) {
    return refused(detail::join("pixels of ", p.channels, " and ", p.output_channels,
                                " channels are no whole 16 bytes"));
  }
  int64_t inputs = p.channels, outputs = p.output_channels;
  for (AxisProblem const& axis : p.axes) {
    if (axis.input < 1 || axis.output < 1) return refused("the input or the output is empty");
    inputs *= axis.input;
    outputs *= axis.output;
  }
  if (std::max(inputs, outputs) > kMostPixels) {
    return refused(detail::join("a sample has ", std::max(inputs, outputs), " elements, up to ",
                                kMostPixels, " are served"));
  }
  Schedule s;
  for (int i = 0; i < kMaxAxes; ++i) {
    AxisProblem const& axis = p.axes[i];
    s.shift[i] = axis.padding / kStride;
    s.positions[i] = int(ceil_div(axis.output, axis.stride));
    s.tiles[i] = int(ceil_div(s.positions[i], i == 0 ? 1 : kEdge));
  }
  s.channel_blocks = int(ceil_div(p.output_channels, shape.channels));
  if (p.channels > kMostChannels) {
    return refused(detail::join("filters of ", p.channels, " channels have no room beside a ring"));
  }
  s.chunks = int(ceil_div(p.channels, kChunk));
  s.steps = int(ceil_div(p.channels, kStepChannels));
  s.halo_rows = kHaloEdge * kHaloEdge * (deep ? 2 : 1);
  s.stage_bytes = int(round_up(s.halo_rows * kRowBytes, kStageAlignment));
  s.values_bytes = values_bytes(shape);
  s.kept_bytes = s.steps * shape.taps() * shape.channels * kStepChannels * 2;
  s.ring_offset = int(round_up(s.kept_bytes, kStageAlignment));
  int const room = device.shared_bytes - kBarrierBytes - s.values_bytes - s.ring_offset;
  s.stages = std::min(kMostStages, room / s.stage_bytes);
  // Consumers of a tile's planes free its stages together, and who has the second waits for its
  // turn until the first's stages are all full.
  if (s.stages < std::max(kLeastStages, deep ? s.chunks : 0)) {
    return refused(detail::join("filters of ", p.channels, " channels have no room beside a ring"));
  }
  s.filter_bytes = int64_t(s.kept_bytes) * s.channel_blocks;
  // A thread packs a vector, and counts them all.
  if (s.filter_bytes / 16 > kMostPixels) {
    return refused(detail::join("the packed filter has ", s.filter_bytes, " bytes, up to ",
                                16 * kMostPixels, " are served"));
  }
  s.shared_bytes = s.ring_offset + s.stages * s.stage_bytes + s.values_bytes + kBarrierBytes;
  // As many parts as there are blocks for a channel block, where a sample has tiles enough.
  int const blocks = std::max(1, device.multiprocessors / s.channel_blocks);
  s.part_tiles = int(ceil_div(s.sample_tiles(), blocks));
  s.parts = int(ceil_div(s.sample_tiles(), s.part_tiles));
  s.tile_cycles = s.steps * step_cycles(shape);
  return s;
}

}  // namespace fusedconv::conv::sm90::phases
