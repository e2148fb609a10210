#include "conv/direct/schedule.hpp"

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>
#include <string>

#include "fusedconv/check.hpp"

namespace fusedconv::conv::direct {
namespace {

constexpr int kGoodWeightBytes = 20 << 10;  // of a team
constexpr int kGoodPixelBytes = 40 << 10;   // of a block, channels last
constexpr int kMostOutputs = 16384;         // of a tile
constexpr int kPixelsOfThread = 32;
// Channels first, in instructions of a thread: to stage four positions, for an output beside its
// products, for one of these, for a unit, for a group of output channels and for a tile.
constexpr double kStagingCost = 35.0;
constexpr double kOutputCost = 12.0;
constexpr double kProductCost = 1.2;
constexpr double kGeneralProductCost = 8.0;
constexpr double kUnitCost = 100.0;
constexpr double kGroupCost = 150.0;
constexpr double kTileCost = 300.0;
constexpr double kSegmentCost = 400.0;  // of outputs that are contiguous
// How many lanes read a quad of shared memory at once, and by which share a unit takes longer where
// they are of other lines than neighbours too, for each that may lie in the same banks.
constexpr int kQuadsAtOnce = 8;
constexpr double kConflictCost = 0.05;

Schedule refused(std::string reason) {
  Schedule result;
  result.support = Support::no(std::move(reason));
  return result;
}

// Index into kRunTaps. The phases along the other axes are in a table then.
int compiled_taps(Problem const& p) {
  if (p.axes[0].stride > kFirstPhases || p.axes[1].stride > kFirstPhases) return kGeneral;
  AxisProblem const& width = p.axes[2];
  for (int i = 0; i < kRunTapsCount; ++i) {
    RunTaps const& taps = kRunTaps[i];
    if (width.stride == taps.stride && width.kernel == taps.kernel && width.dilation == 1 &&
        width.padding % taps.stride == taps.residue) {
      return i;
    }
  }
  return kGeneral;
}

// Extents of tiles to try: an axis in one, two, three and more parts.
template <class Body>
void for_parts(int extent, Body const& body) {
  int last = 0;
  for (int parts = 1; parts <= extent; parts = std::max(parts + 1, parts * 4 / 3)) {
    int const size = int(ceil_div(extent, parts));
    if (size != last) body(size);
    last = size;
  }
}

// Along depth and height.
void set_tile(Schedule& s, int d, int h) {
  s.tile[0] = d;
  s.tile[1] = h;
  for (int i = 0; i < 2; ++i) {
    Axis const& axis = s.axes[i];
    s.tiles[i] = int(ceil_div(axis.positions, s.tile[i]));
    s.extent[i] =
        int(std::min<int64_t>(int64_t(s.tile[i]) * axis.problem.stride, axis.problem.output));
  }
}

// The least number from `least` on that differs from `like` by whole vectors.
int64_t congruent(int64_t least, int64_t like, int vector) {
  return least + ((like - least) % vector + vector) % vector;
}

// Channels first: how a team's outputs lie in shared memory on their way, and what they take there.
int64_t staged_bytes(Schedule& s, int element) {
  int const vector = 16 / element;
  int64_t const width = s.axes[2].problem.output;
  int64_t const plane = width * s.axes[1].problem.output;
  s.joined = s.tile[2] == width;
  int64_t const segment = s.joined ? s.extent[1] * width : s.tile[2];
  int64_t const line = s.joined ? width : congruent(segment, width, vector);
  int64_t const staged_plane = congruent(s.extent[1] * line, plane, vector);
  int64_t const pixels = plane * s.axes[0].problem.output;
  int64_t const channel = congruent(s.extent[0] * staged_plane, pixels, vector);
  if (channel > std::numeric_limits<int>::max()) return channel * element;
  s.segment = int(segment);
  s.staged = {int(channel), int(staged_plane), int(line)};
  // The first begins up to a vector behind a multiple of 16 bytes.
  return s.stores_runs ? 0 : (round_up(s.unit_channels * channel, vector) + vector) * element;
}

// Channels first: the box and what shared memory a team's tile takes, in bytes.
int64_t team_bytes(Schedule& s, Problem const& p, int element) {
  AxisProblem const& width = s.axes[2].problem;
  // Few lines along height leave a thread's rows no room there.
  bool const across = s.axes[1].positions <= s.rows / 2;
  int64_t const runs = ceil_div(s.tile[2], s.run);
  int const unit = s.run_taps == kGeneral ? width.stride : 4;
  s.strip = across ? int(round_up(ceil_div(runs, s.rows), unit)) : 0;
  s.row_groups = across ? s.tile[1] : int(ceil_div(s.tile[1], s.rows));
  for (int i = 0; i < 2; ++i) {
    s.before[i] = s.axes[i].lowest;
    s.box[i] = s.tile[i] + s.axes[i].highest - s.axes[i].lowest;
  }
  if (!across) s.box[1] += s.row_groups * s.rows - s.tile[1];
  int const columns = across ? s.rows * s.strip * s.run : s.tile[2];
  if (s.run_taps != kGeneral) {
    RunTaps const& taps = kRunTaps[s.run_taps];
    s.before[2] = width.padding / taps.stride + taps.lowest(s.run);
    s.box[2] = int(ceil_div(columns, s.run) - 1) * (s.run / taps.stride) + taps.window(s.run);
  } else {
    s.before[2] = s.axes[2].lowest;
    s.box[2] = (columns - 1) / width.stride + 2 + s.axes[2].highest - s.axes[2].lowest;
  }
  s.box[2] = int(round_up(s.box[2], 4));
  // Neighbours read quads of neighbouring lines: an odd number of quads lies in different banks.
  if (!s.stores_runs && s.box[2] % 8 == 0) s.box[2] += 4;
  int64_t const box = int64_t(s.box[0]) * s.box[1] * s.box[2] * p.channels;
  return 4 * (box + s.weight_floats + s.bias_floats()) + staged_bytes(s, element);
}

// Whether a depthwise filter of 4 x 4 doubles planes.
bool doubles_planes(Problem const& p) {
  auto const doubles = [](AxisProblem const& axis) {
    return axis.kernel == 4 && axis.stride == 2 && axis.padding == 1 && axis.dilation == 1 &&
           axis.output == 2 * axis.input;
  };
  AxisProblem const& depth = p.axes[0];
  return depth.input == 1 && depth.output == 1 && depth.kernel == 1 && p.channels == 1 &&
         p.output_channels == 1 && p.aligned && doubles(p.axes[1]) && doubles(p.axes[2]) &&
         p.axes[2].input % kDoubledInputs == 0;
}

Schedule planes(Schedule s, Problem const& p, int element, Device const& device) {
  s.doubles = doubles_planes(p);
  s.run_taps = compiled_taps(p);
  s.run = s.run_taps == kGeneral ? 1 : run_of(element);
  s.stores_runs = s.run_taps != kGeneral && p.axes[2].output % s.run == 0;
  int64_t const taps = int64_t(p.axes[0].kernel) * p.axes[1].kernel;
  int64_t const channel_weights = taps * round_up(p.axes[2].kernel, 4) * p.channels;
  s.block_channels =
      int(std::clamp<int64_t>(kGoodWeightBytes / (4 * channel_weights), 1, p.output_channels));
  int const several = channels_of(element, p.axes[2].kernel);
  // Three of four are as much work as four, and three one by one are more.
  if (s.run_taps != kGeneral && s.block_channels * 4 >= several * 3) {
    s.unit_channels = several;
    int const fitting = std::max(several, s.block_channels / several * several);
    s.block_channels =
        s.block_channels < p.output_channels ? fitting : int(round_up(p.output_channels, several));
  }
  s.rows = rows_of(s.run, s.unit_channels);
  s.channel_blocks = int(ceil_div(p.output_channels, s.block_channels));
  int64_t const weights = s.block_channels * channel_weights;
  if (weights * 4 > device.shared_bytes) {
    return refused("the filter of a channel exceeds the shared memory of a multiprocessor");
  }
  s.weight_floats = int(weights);
  double products = p.channels;  // of an output
  for (AxisProblem const& axis : p.axes) products *= double(axis.kernel) / axis.stride;
  double const product_cost = s.run_taps == kGeneral ? kGeneralProductCost : kProductCost;
  double const unit_cost =
      kUnitCost + s.unit_channels * s.rows * s.run * (kOutputCost + products * product_cost);
  int const groups = s.block_channels / s.unit_channels;
  int64_t const good_bytes = device.shared_bytes / blocks_of(s.unit_channels) - kSystemSharedBytes;
  double best = std::numeric_limits<double>::max();
  Schedule result = s;
  auto const consider = [&](int d, int h, int w, int64_t most_bytes) {
    Schedule candidate = s;
    set_tile(candidate, d, h);
    candidate.tile[2] = candidate.extent[2] = w;
    candidate.tiles[2] = int(ceil_div(s.axes[2].problem.output, w));
    int64_t const outputs = int64_t(candidate.extent[0]) * candidate.extent[1] * w;
    int64_t const bytes = team_bytes(candidate, p, element);
    int64_t const runs = candidate.strip > 0 ? candidate.strip : ceil_div(w, s.run);
    int64_t const units = runs * candidate.row_groups * s.axes[1].phases * d * s.axes[0].phases;
    if (bytes + kMomentsBytes > most_bytes) return;
    if (outputs > kMostOutputs && most_bytes == good_bytes) return;
    int const threads =
        int(std::clamp<int64_t>(int64_t(std::bit_ceil(uint64_t(units))), kWarp, kThreads));
    candidate.teams = kThreads / threads;
    while (candidate.teams > 1 && candidate.teams * bytes + kMomentsBytes > most_bytes) {
      candidate.teams /= 2;
    }
    int64_t const team = candidate.team_threads();
    double const staged = double(ceil_div(int64_t(p.channels) * candidate.box_floats() / 4, team));
    int const ways =
        s.stores_runs ? 1 : kQuadsAtOnce / std::gcd(candidate.row_groups, kQuadsAtOnce);
    int64_t const segments = s.stores_runs ? 0 : s.unit_channels * candidate.segments();
    double const computed =
        double(ceil_div(units, team)) * unit_cost * (1.0 + (ways - 1) * kConflictCost) +
        double(ceil_div(segments, team)) * kSegmentCost + kGroupCost;
    double const cost = double(candidate.sample_tiles()) * double(team) *
                        (staged * kStagingCost + computed * groups + kTileCost);
    if (cost >= best) return;
    best = cost;
    candidate.shared_bytes = int(kMomentsBytes + candidate.teams * bytes);
    result = candidate;
  };
  int const lines = int(ceil_div(p.axes[2].output, s.run));
  for (int64_t const most : {good_bytes, int64_t(device.shared_bytes)}) {
    for_parts(lines, [&](int runs) {
      for_parts(s.axes[1].positions, [&](int h) {
        for_parts(s.axes[0].positions,
                  [&](int d) { consider(d, h, std::min(runs * s.run, p.axes[2].output), most); });
      });
    });
    if (best < std::numeric_limits<double>::max()) return result;
  }
  return refused("no tile fits the shared memory of a multiprocessor");
}

Schedule pixels(Schedule s, Problem const& p, int element, Device const& device) {
  int const all = p.output_channels * p.groups;
  int const widest = 16 / element;
  bool const depthwise = p.channels == 1 && p.output_channels == 1;
  s.vector = depthwise && p.aligned && all % widest == 0 ? widest : 1;
  int64_t taps = p.channels;
  for (AxisProblem const& axis : p.axes) taps *= axis.kernel;
  // Of a thread's channels; moments take the place of the weights.
  int64_t const column = s.vector * 4 * taps;
  int const columns = all / s.vector;
  int const good = int(std::clamp<int64_t>(kGoodPixelBytes / column, 1, 2 * kWarp));
  s.channel_blocks = int(ceil_div(columns, std::min(columns, good)));
  int const block_columns = int(ceil_div(columns, s.channel_blocks));
  s.block_channels = block_columns * s.vector;
  s.teams = 1;
  int64_t const outputs = int64_t(kThreads / block_columns) * kPixelsOfThread;
  // Whole lines where they fit: neighbours share what they read.
  auto const& axes = s.axes;
  auto const quotients = [&](int axis, int64_t line) {
    int64_t const fitting = outputs / (line * axes[axis].phases);
    int64_t const parts = ceil_div(axes[axis].positions, std::max<int64_t>(1, fitting));
    return int(ceil_div(axes[axis].positions, parts));
  };
  s.tile[2] = s.extent[2] = quotients(2, 1);
  s.tiles[2] = int(ceil_div(axes[2].positions, s.tile[2]));
  s.lines[2] = axes[2].phases;
  int64_t const line = int64_t(s.tile[2]) * axes[2].phases;
  int const h = quotients(1, line);
  set_tile(s, quotients(0, line * h * axes[1].phases), h);
  for (int i = 0; i < 2; ++i) s.lines[i] = s.tile[i] * axes[i].phases;
  int64_t const weights = column * block_columns;
  int64_t const bytes = s.table_bytes() + std::max<int64_t>(weights, kThreads * s.vector * 16);
  if (bytes > device.shared_bytes) {
    return refused(
        "the filter of a channel or a tile's table of taps exceeds the shared memory of "
        "a multiprocessor");
  }
  s.weight_floats = int(weights / 4);
  s.shared_bytes = int(bytes);
  return s;
}

}  // namespace

Schedule schedule_of(Problem const& p, Math math, Device const& device) {
  int64_t const products = int64_t(p.channels) * p.output_channels;
  if (products > kMostProducts && p.channels > kFewChannels) {
    return refused(detail::join("a group has ", p.channels, " input and ", p.output_channels,
                                " output channels; products up to ", kMostProducts, " or up to ",
                                kFewChannels, " input channels are served"));
  }
  Schedule s;
  int64_t inputs = 1, outputs = 1;
  for (int i = 0; i < kMaxAxes; ++i) {
    inputs *= p.axes[i].input;
    outputs *= p.axes[i].output;
    if (p.axes[i].stride > kMostStride) {
      return refused(
          detail::join("its stride is ", p.axes[i].stride, ", up to ", kMostStride, " is served"));
    }
  }
  constexpr int64_t kMost = int64_t(1) << 30;
  if (std::max(inputs, outputs) > kMost) {
    return refused(detail::join("a channel has ", std::max(inputs, outputs), " pixels, up to ",
                                kMost, " are served"));
  }
  for (int i = 0; i < kMaxAxes; ++i) s.axes[i] = Axis::of(p.axes[i]);
  int const element = traits_of(math).element_bytes();
  return p.layout == Layout::kChannelsLast ? pixels(s, p, element, device)
                                           : planes(s, p, element, device);
}

}  // namespace fusedconv::conv::direct
