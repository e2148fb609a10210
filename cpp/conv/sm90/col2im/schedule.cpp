#include "conv/sm90/col2im/schedule.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90::col2im {
namespace {

// Cycles: of a block before its first products and behind its last output, of a byte that is
// copied, of storing a row of products of a group of warps; of a pixel of 256 threads, and of a
// channel of it.
constexpr double kBlock = 6500.0;
constexpr double kByte = 0.022;
constexpr double kColumn = 4.0;
constexpr double kUnit = 350.0;
constexpr double kOutput = 50.0;
constexpr double kTap = 64.0;  // of a channel whose taps are looped over, not timed
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

// How many quotients of the stride a tile along an axis may have: of each number of tiles the
// fewest, many first.
std::vector<int> quotients_of(Axis const& axis, int most_positions, int64_t most_outputs) {
  std::vector<int> result;
  auto const evened = [&](int quotients) {
    return int(ceil_div(axis.positions, ceil_div(axis.positions, quotients)));
  };
  int const most = int(std::min<int64_t>(axis.positions, most_outputs / axis.problem.stride));
  for (int each = most > 0 ? evened(most) : 0; each > 0; each = each > 1 ? evened(each - 1) : 0) {
    if (box_of(axis, each) <= std::min(most_positions, kMostBox)) result.push_back(each);
  }
  return result;
}

// Cuts a sample into few tiles, of these into small boxes; false where none has room.
// most_reaches: outputs of a tile along all axes together.
bool cut(Schedule& s, int most_positions, int64_t most_reaches, int channels) {
  auto const& axes = s.axes;
  std::array<std::vector<int>, kMaxAxes> each;
  for (int a = 0; a < kMaxAxes; ++a) {
    each[a] = quotients_of(axes[a], most_positions, most_reaches);
  }
  int64_t best = 0, least = 0;
  for (int const d : each[0]) {
    for (int const h : each[1]) {
      for (int const w : each[2]) {
        int const quotients[kMaxAxes] = {d, h, w};
        int64_t tiles = 1, box = 1, reaches = 0, outputs = channels;
        for (int a = 0; a < kMaxAxes; ++a) {
          int64_t const tile = int64_t(quotients[a]) * axes[a].problem.stride;
          tiles *= ceil_div(axes[a].positions, quotients[a]);
          box *= box_of(axes[a], quotients[a]);
          reaches += tile;
          outputs *= tile;
        }
        if (box > most_positions || reaches > most_reaches || outputs > kMostPixels) continue;
        // Of those alike the widest, which come last.
        if (best == 0 || tiles < best || (tiles == best && box <= least)) {
          best = tiles;
          least = box;
          for (int a = 0; a < kMaxAxes; ++a) {
            s.tile[a] = quotients[a] * axes[a].problem.stride;
            s.tiles[a] = int(ceil_div(axes[a].positions, quotients[a]));
            s.box[a] = box_of(axes[a], quotients[a]);
          }
        }
        break;  // of fewer along width there are more
      }
    }
  }
  return best > 0;
}

// Cycles of a thread that adds up so many channels of a pixel in turn.
double unit_cycles(Schedule const& s, int channels) {
  double const taps = s.has_short_taps() ? 0.0 : s.axes[0].taps * s.axes[1].taps * s.axes[2].taps;
  return kUnit + channels * (kOutput + kTap * taps);
}

double round_cycles(Schedule const& s, int pixels, int channels, int share) {
  int64_t const units = int64_t(pixels) * ceil_div(channels, share);
  return double(ceil_div(units, kConsumerThreads)) * unit_cycles(s, share);
}

Pieces pieces_of(Schedule const& s, int channels, int size) {
  int const vector = 16 / size, pixel = channels * size;
  Pieces result;
  // Behind a lead of less than 16 bytes.
  result.pixels = std::min(s.tile[2], (kStagedBytes - 2 * 16) / pixel);
  result.of_line = int(ceil_div(s.tile[2], result.pixels));
  result.pitch = int(round_up(result.pixels * channels + vector - 1, vector));
  int const count = s.tile[0] * s.tile[1] * result.of_line;
  result.together = std::min(count, kStagedBytes / (result.pitch * size));
  double best = 0.0;
  for (int share = int(round_up(channels, kTogether)); share > 0; share -= kTogether) {
    double const cycles = round_cycles(s, result.together * result.pixels, channels, share);
    if (best == 0.0 || cycles < best) {
      best = cycles;
      result.share_channels = share;
    }
  }
  return result;
}

double stored_cycles(Schedule const& s, int channels) {
  Pieces const& pieces = s.pieces;
  int64_t const count = int64_t(s.tile[0]) * s.tile[1] * pieces.of_line;
  return double(ceil_div(count, pieces.together)) *
         round_cycles(s, pieces.together * pieces.pixels, channels, pieces.share_channels);
}

}  // namespace

Schedule schedule_of(TransposedProblem const& p, Shape const& shape, Math math,
                     Device const& device) {
  if (p.layout != Layout::kChannelsLast) return refused("the layout is channels first");
  if (p.groups != 1) return refused("the convolution has groups");
  if (p.channels < 1 || p.output_channels < 1) return refused("there are no channels");
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
    return refused(detail::join("a sample has ", inputs, " input and ", outputs,
                                " output pixels of ", p.output_channels, " channels, up to ",
                                kMostPixels, " elements of either are served"));
  }
  int const stage = shape.stage_bytes(size);
  int const maps = int(round_up(p.output_channels * kMapBytes, kReachBytes));
  int64_t const room = device.shared_bytes - kBarrierBytes - maps -
                       std::max(2 * stage, shape.products_bytes() + kStagedBytes);
  if (!cut(s, shape.positions(), room / kReachBytes, p.output_channels)) {
    return refused(
        detail::join("the filter or its stride reaches more positions than a block has "
                     "room for: ",
                     shape.positions(), ", and ", room / kReachBytes, " outputs along all axes"));
  }
  s.columns = int(round_up(columns, vector));
  s.chunks = int(ceil_div(int64_t(p.channels) * size, kChunkBytes));
  s.filter_bytes = int64_t(p.channels) * s.columns * size;
  int const before_reaches = kBarrierBytes + maps;
  int const behind = before_reaches + (s.tile[0] + s.tile[1] + s.tile[2]) * kReachBytes;
  s.stages = std::min({kMostStages, (device.shared_bytes - behind) / stage, std::max(s.chunks, 2)});
  s.pieces = pieces_of(s, p.output_channels, size);
  s.reserved = std::max(s.stages * stage, shape.products_bytes() + kStagedBytes);
  s.reaches = s.reserved + before_reaches;
  s.shared_bytes = s.reserved + behind;
  // Products at full rate, or copies.
  double const products =
      kConsumers * shape.slabs * s.chunks * (kChunkBytes / kStepBytes) * shape.columns / 2.0;
  double const copied =
      double(s.chunks) * kChunkBytes * double(s.box[0] * s.box[1] * s.box[2] + s.columns) * kByte;
  s.block_cycles = kBlock + std::max(products, copied) + kColumn * shape.slabs * shape.columns +
                   stored_cycles(s, p.output_channels);
  return s;
}

}  // namespace fusedconv::conv::sm90::col2im
