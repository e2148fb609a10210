#include "conv/sm90/col2im/schedule.hpp"

#include <algorithm>
#include <utility>

#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90::col2im {
namespace {

// Cycles: of a block before its first products and behind its last output, of a byte that is
// copied, of storing a row of products of a group of warps, and of an output of 256 threads.
constexpr double kBlock = 6500.0;
constexpr double kByte = 0.022;
constexpr double kColumn = 4.0;
constexpr double kOutput = 0.7;
constexpr int64_t kMostPixels = int64_t(1) << 30;
constexpr int kMostBox = 256;  // of an axis of a tensor copy

Schedule refused(std::string reason) {
  Schedule result;
  result.support = Support::no(std::move(reason));
  return result;
}

// Positions of the input that tiles of so many quotients of the stride meet, at most.
int box_of(Axis const& axis, int quotients) {
  int const input = axis.problem.input;
  // Of two tiles at most each meets a border.
  if (ceil_div(axis.positions, quotients) > 2) {
    return std::min(input, quotients + axis.highest - axis.lowest);
  }
  int result = 1;
  for (int first = 0; first < axis.positions; first += quotients) {
    int const end = std::min(first + quotients, axis.positions);
    int const low = std::max(first + axis.lowest, 0);
    int const high = std::min(end - 1 + axis.highest, input - 1);
    result = std::max(result, high - low + 1);
  }
  return result;
}

}  // namespace

Schedule schedule_of(TransposedProblem const& p, Shape const& shape, Math math,
                     Device const& device) {
  if (p.layout != Layout::kChannelsLast) return refused("the layout is channels first");
  if (p.groups != 1) return refused("the convolution has groups");
  int const size = traits_of(math).element_bytes();
  int const vector = 16 / size;
  if (p.channels % vector != 0) {
    return refused(detail::join(p.channels, " input channels are no whole 16 bytes"));
  }
  if (!p.aligned) return refused("the input begins at no multiple of 16 bytes");
  int64_t columns = p.output_channels, inputs = 1, outputs = 1;
  Schedule s;
  for (int a = 0; a < kMaxAxes; ++a) {
    AxisProblem const& axis = p.axes[a];
    columns *= axis.kernel;
    inputs *= axis.input;
    outputs *= axis.output;
    s.axes[a] = Axis::of(axis);
  }
  if (columns > shape.columns) {
    return refused(detail::join("output channels of taps are ", columns, ", up to ", shape.columns,
                                " are served"));
  }
  if (std::max(inputs, outputs) * p.output_channels > kMostPixels || inputs > kMostPixels) {
    return refused("a sample is too large");
  }
  // Few blocks, then small boxes.
  int64_t best = 0, least = 0;
  auto const& axes = s.axes;
  int const most = shape.positions();
  int const whole[kMaxAxes] = {axes[0].positions, axes[1].positions, axes[2].positions};
  for (int d = 1; d <= whole[0] && box_of(axes[0], d) <= most; ++d) {
    int const depth = box_of(axes[0], d);
    for (int h = 1; h <= whole[1] && depth * box_of(axes[1], h) <= most; ++h) {
      int const plane = depth * box_of(axes[1], h);
      int w = 0;
      while (w < whole[2] && box_of(axes[2], w + 1) <= kMostBox &&
             plane * box_of(axes[2], w + 1) <= most) {
        ++w;
      }
      if (w == 0) continue;
      w = int(ceil_div(whole[2], ceil_div(whole[2], w)));
      int64_t const tiles = ceil_div(whole[0], d) * ceil_div(whole[1], h) * ceil_div(whole[2], w);
      int64_t const box = int64_t(plane) * box_of(axes[2], w);
      if (best > 0 && (tiles > best || (tiles == best && box >= least))) continue;
      best = tiles;
      least = box;
      int const quotients[kMaxAxes] = {d, h, w};
      for (int a = 0; a < kMaxAxes; ++a) {
        s.tile[a] = quotients[a] * axes[a].problem.stride;
        s.tiles[a] = int(ceil_div(whole[a], quotients[a]));
        s.box[a] = box_of(axes[a], quotients[a]);
      }
    }
  }
  if (best == 0) return refused("the filter reaches more positions than a block has");
  s.columns = int(round_up(columns, vector));
  s.chunks = int(ceil_div(int64_t(p.channels) * size, kChunkBytes));
  s.filter_bytes = int64_t(p.channels) * s.columns * size;
  int const stage = shape.stage_bytes(size);
  int const reserved =
      kBarrierBytes + int(round_up((s.tile[0] + s.tile[1] + s.tile[2]) * kReachBytes, 16));
  int const room = device.shared_bytes - reserved;
  s.stages = std::min({kMostStages, room / stage, std::max(s.chunks, 2)});
  if (s.stages < 2 || shape.products_bytes() > room) {
    return refused("a block exceeds a multiprocessor's shared memory");
  }
  s.shared_bytes = std::max(s.stages * stage, shape.products_bytes()) + reserved;
  // Products at full rate, or copies.
  double const products =
      kConsumers * shape.slabs * s.chunks * (kChunkBytes / kStepBytes) * shape.columns / 2.0;
  double const copied = double(s.chunks) * kChunkBytes * double(least + s.columns) * kByte;
  int64_t const stored = int64_t(s.tile[0]) * s.tile[1] * s.tile[2] * p.output_channels;
  s.block_cycles = kBlock + std::max(products, copied) + kColumn * shape.slabs * shape.columns +
                   kOutput * double(stored);
  return s;
}

}  // namespace fusedconv::conv::sm90::col2im
