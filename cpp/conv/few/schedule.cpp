#include "conv/few/schedule.hpp"

#include <algorithm>
#include <cstdlib>
#include <string>

#include "fusedconv/check.hpp"
#include "fusedconv/types.hpp"

namespace fusedconv::conv::few {
namespace {

constexpr int kMostPlanes = 16;  // of a block, where there are blocks enough
constexpr int kMostLines = 16;
// Of a plane's inputs and barriers, in units of a warp, where its outputs are staged beside those
// of the plane before, and where they wait for these.
constexpr double kPlaneCost = 0.5;
constexpr double kWaitingPlaneCost = 0.75;
constexpr int64_t kMostPixels = int64_t(1) << 30;  // of a channel

Schedule refused(std::string reason) {
  Schedule result;
  result.support = Support::no(std::move(reason));
  return result;
}

// The most lanes of a warp that meet in a bank of shared memory, of those that are served together,
// where each stores `words` at a time into lines of channels `channel` elements apart.
int lanes_of_a_bank(int64_t channel, int size, int words) {
  int most = 0;
  int const together = kWarp / words;
  for (int first = 0; first < kWarp; first += together) {
    int lanes[kWarp] = {};
    for (int lane = first; lane < first + together; ++lane) {
      int64_t const elements = channel * kSlots * (lane / 4) + kRun * (lane % 4);
      for (int i = 0; i < words; ++i) ++lanes[(elements * size / 4 + i) % kWarp];
    }
    most = std::max(most, *std::max_element(lanes, lanes + kWarp));
  }
  return most;
}

// The least number from `least` on that differs from `like` by whole vectors, and by which few
// lanes meet in a bank. Where that takes no more than two lanes, it differs by whole lines of
// memory, as bulk copies are cut into what is a line on both sides.
int64_t staged_channel(int64_t least, int64_t like, int size, int words) {
  constexpr int kFewLanes = 2;
  int const vector = kVectorBytes / size, line = kLineBytes / size;
  int64_t best = 0;
  int best_cost = 0;
  for (int i = 0; i < line / vector; ++i) {
    int64_t const candidate = least + ((like - least) % vector + vector) % vector + i * vector;
    int const lanes = std::max(kFewLanes, lanes_of_a_bank(candidate, size, words));
    int const cost = 2 * lanes + int((candidate - like) % line != 0);
    if (i > 0 && cost >= best_cost) continue;
    best = candidate;
    best_cost = cost;
  }
  return best;
}

}  // namespace

Schedule schedule_of(Problem const& p, Math math, Device const& device) {
  if (p.layout != Layout::kChannelsFirst) return refused("the layout is channels last");
  if (p.groups != 1) return refused("the convolution has groups");
  if (p.channels > kMostInputs) {
    return refused(detail::join(p.channels, " input channels; up to ", kMostInputs, " are served"));
  }
  if (!(is_doubled(p.axes[0]) || is_absent(p.axes[0])) || !is_doubled(p.axes[1]) ||
      !is_doubled(p.axes[2])) {
    return refused("served are filters of 3 taps with stride 2, dilation 1 and odd padding");
  }
  int64_t pixels = 1, inputs = 1;
  for (AxisProblem const& axis : p.axes) {
    pixels *= axis.output;
    inputs *= axis.input;
  }
  if (std::max(pixels, inputs) > kMostPixels) {
    return refused(detail::join("a channel has ", std::max(pixels, inputs), " pixels, up to ",
                                kMostPixels, " are served"));
  }
  Schedule s;
  for (int i = 0; i < kMaxAxes; ++i) {
    AxisProblem const& axis = p.axes[i];
    s.shift[i] = axis.padding / axis.stride;
    s.quotients[i] = int(ceil_div(axis.output, axis.stride));
  }
  int const size = traits_of(math).element_bytes();
  int const vector = kVectorBytes / size, line = kLineBytes / size;
  int const width = p.axes[2].output;
  s.channel_blocks = int(ceil_div(p.output_channels, kBlockChannels));
  s.width_tiles = int(ceil_div(s.quotients[2], kQuotients));
  s.box_columns = s.width_tiles * kQuotients + 1;
  s.operand_bytes = kOperands * kWarp * 2 * size;
  int const plane_slots = p.axes[0].kernel > 1 ? kPlaneSlots : 1;
  s.vectors = width % vector == 0 && pixels % vector == 0;
  int const words = s.vectors ? kVectorBytes / 4 : size / 2;  // of an access to staged outputs
  auto const take = [&](int lines, int buffers) {
    s.lines = lines;
    s.buffers = buffers;
    s.box_lines = lines + 1;
    s.box_bytes = int(round_up(
        int64_t(plane_slots) * s.box_lines * s.box_columns * kMostInputs * size, kLineBytes));
    int64_t const channel = staged_channel(int64_t(kStride) * lines * width, pixels, size, words);
    int64_t const staged = round_up(kBlockChannels * channel, line) + line;
    int64_t const bytes = kMomentsBytes + s.operand_bytes + s.box_bytes + buffers * staged * size;
    if (bytes > device.shared_bytes) return false;
    s.staged_channel = int(channel);
    s.staged_elements = int(staged);
    s.staged_bytes = int(buffers * staged * size);
    s.shared_bytes = int(bytes);
    return true;
  };
  // So many that all warps have as much to do, tiles are of equal size and few inputs are staged
  // more than once.
  int best = 0, buffers = 0;
  double least = 0.0;
  for (int blocks = blocks_of(math); blocks > 0 && best == 0; --blocks) {
    int64_t const most = device.shared_bytes / blocks - (blocks > 1 ? kSystemSharedBytes : 0);
    for (int const each : {2, 1}) {
      bool const waits = each == 1 && p.axes[0].output > 1;
      if (each == 2 && p.axes[0].output == 1) continue;
      for (int lines = 1; lines <= std::min(kMostLines, s.quotients[1]); ++lines) {
        if (!take(lines, each) || s.shared_bytes > most) break;
        int64_t const tiles = ceil_div(s.quotients[1], lines);
        double const rounds = double(ceil_div(int64_t(lines) * s.width_tiles, kWarps));
        double const cost = double(tiles) * (rounds + (waits ? kWaitingPlaneCost : kPlaneCost));
        if (best > 0 && cost >= least) continue;
        best = lines;
        buffers = each;
        least = cost;
      }
    }
  }
  if (best == 0) return refused("a line of outputs exceeds a multiprocessor's shared memory");
  take(best, buffers);
  s.tiles[1] = int(ceil_div(s.quotients[1], best));
  int const planes = p.axes[0].output;
  s.tiles[0] = int(ceil_div(planes, kMostPlanes));
  s.planes = int(round_up(ceil_div(planes, s.tiles[0]), kStride));
  s.tiles[0] = int(ceil_div(planes, s.planes));
  return s;
}

}  // namespace fusedconv::conv::few
