#include "conv/taps/schedule.hpp"

#include <algorithm>
#include <limits>

#include "fusedconv/check.hpp"

namespace fusedconv::conv::taps {
namespace {

Schedule refused(std::string reason) {
  Schedule result;
  result.support = Support::no(std::move(reason));
  return result;
}

int floor_mod(int a, int b) { return (a % b + b) % b; }

// What staging a position of the box costs, in terms of computing a position of the tile for one
// tap, divided by how many taps it serves.
constexpr double kStagingCost = 0.5;

// Chooses the tile, as few as may be for boxes that are not much larger; false where none fits.
// vector: neighbouring columns that are read at once.
bool lay_out(Schedule& s, int positions, int vector) {
  double best = std::numeric_limits<double>::max();
  auto const& axes = s.axes;
  int const d = axes[0].positions, h = axes[1].positions, w = axes[2].positions;
  for (int tw = 1; tw <= std::min(w, positions); ++tw) {
    // Boxes of all tiles begin at the same place between vectors.
    if (tw < w && tw % vector != 0) continue;
    for (int th = 1; th <= std::min(h, positions / tw); ++th) {
      Schedule candidate = s;
      candidate.tile = {std::min(d, positions / (tw * th)), th, tw};
      for (int i = 0; i < kMaxAxes; ++i) {
        Axis const& axis = axes[i];
        candidate.tiles[i] = int(ceil_div(axis.positions, candidate.tile[i]));
        int const reach =
            s.split[i] ? axis.highest_shift - axis.lowest_shift : axis.highest - axis.lowest;
        candidate.box[i] = candidate.tile[i] + reach;
      }
      candidate.lead = floor_mod(axes[2].lowest, vector);
      candidate.box[2] = int(round_up(candidate.lead + candidate.box[2], vector));
      if (candidate.box_positions() > kMostBoxPositions) continue;
      double const staging = kStagingCost * candidate.box_positions() / s.steps;
      double const cost = double(candidate.sample_tiles()) * (positions + staging);
      if (cost >= best) continue;
      best = cost;
      s.tile = candidate.tile;
      s.tiles = candidate.tiles;
      s.box = candidate.box;
      s.lead = candidate.lead;
    }
  }
  return best < std::numeric_limits<double>::max();
}

}  // namespace

Schedule schedule_of(Problem const& p, Math math, int groups, Device const& device) {
  Schedule s;
  int const element = traits_of(math).element_bytes();
  int const vector = 16 / element;
  for (int i = 0; i < kMaxAxes; ++i) {
    if (p.axes[i].stride > kMaxStride) {
      return refused(
          detail::join("its stride is ", p.axes[i].stride, ", up to ", kMaxStride, " is served"));
    }
    s.axes[i] = Axis::of(p.axes[i]);
  }
  int64_t row_groups = ceil_div(p.output_channels, kGroupRows);
  s.channel_blocks = int(row_groups);
  for (Axis const& axis : s.axes) row_groups *= axis.phases;
  int64_t const blocks = ceil_div(row_groups, groups) * p.groups;
  constexpr int64_t kMost = int64_t(1) << 20;
  if (blocks > kMost) {
    return refused(detail::join("its phases and output channels make ", blocks,
                                " blocks of rows, at most ", kMost, " are served"));
  }
  s.row_groups = int(row_groups);
  s.blocks_m = int(ceil_div(row_groups, groups));
  int const width_phases = s.axes[2].phases;
  s.width_phases = groups % width_phases == 0 ? width_phases : 1;
  s.chunks = int(ceil_div(int64_t(p.channels) * element, kChunkBytes));

  bool const last = p.layout == Layout::kChannelsLast;
  bool const whole = p.aligned && (last ? p.channels : p.axes[2].input) % vector == 0;
  s.loads = !whole ? Loads::kElements : last ? Loads::kChannels : Loads::kPlanes;
  // One after the other, depth first: what is split is read again for each of its taps.
  for (int splits = 0; splits <= kMaxAxes; ++splits) {
    s.stages = s.steps = 1;
    for (int i = 0; i < kMaxAxes; ++i) {
      s.split[i] = i < splits;
      (s.split[i] ? s.stages : s.steps) *= std::max(1, s.axes[i].taps);
    }
    // A tap along width may begin anywhere between vectors.
    if (s.split[2] && s.loads == Loads::kPlanes) s.loads = Loads::kElements;
    int const columns = s.loads == Loads::kPlanes ? vector : 1;
    if (!lay_out(s, block_positions(groups), columns)) continue;
    s.filter_bytes =
        int64_t(p.groups) * s.blocks_m * s.chunks * s.stages * s.steps * step_bytes(groups);
    int const boxes = 2 * s.box_positions() * kPitchBytes;
    int const filter = kFilterSlots * groups * kGroupRows * kPitchBytes;
    int const channels = groups / s.width_phases * kGroupRows;
    int const staged = last ? groups * block_positions(groups) * staged_pixel_pitch(element)
                            : channels * staged_channel_pitch(groups, s.width_phases, element);
    s.shared_bytes =
        std::max(s.list_bytes(groups) + boxes + filter, kMomentBytes + staged * element);
    if (s.shared_bytes > device.shared_bytes) continue;
    return s;
  }
  return refused("no tile's input fits the shared memory of a multiprocessor");
}

}  // namespace fusedconv::conv::taps
