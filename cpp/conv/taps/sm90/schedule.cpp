#include "conv/taps/sm90/schedule.hpp"

#include <algorithm>
#include <limits>
#include <set>

#include "fusedconv/check.hpp"

namespace fusedconv::conv::taps::sm90 {
namespace {

Schedule refused(std::string reason) {
  Schedule result;
  result.support = Support::no(std::move(reason));
  return result;
}

int floor_mod(int a, int b) { return (a % b + b) % b; }

// What staging a position of the box costs, in terms of multiplying a column of the tile by a tap
// of one row group.
constexpr double kStagingCost = 0.7;
// What a tile costs beside its columns' taps, in the same terms.
constexpr double kEpilogueTaps = 3.0;

// By axis, the input positions less q that a phase's taps meet.
std::vector<int> shifts_of(Axis const& axis, int residue) {
  Phase const phase = axis.phase(residue);
  std::vector<int> result;
  for (int j = 0; j < phase.taps; ++j) result.push_back(phase.shift - j * axis.sub_dilation);
  return result;
}

// The lists of taps: for each phase along depth and height, phase set along width and joined row
// group, what any of the group's phases reads.
void list_taps(Schedule& s) {
  s.first_tap = {0};
  s.taps.clear();
  for (int z = 0; z < s.axes[0].phases; ++z) {
    for (int y = 0; y < s.axes[1].phases; ++y) {
      for (int x = 0; x < s.axes[2].phases; x += s.group_phases) {
        std::set<int> columns;
        for (int i = 0; i < s.group_phases; ++i) {
          for (int shift : shifts_of(s.axes[2], x + i)) columns.insert(shift);
        }
        for (int dz : shifts_of(s.axes[0], z)) {
          for (int dy : shifts_of(s.axes[1], y)) {
            for (int dx : columns) s.taps.push_back({int16_t(dz), int16_t(dy), int16_t(dx)});
          }
        }
        s.first_tap.push_back(uint16_t(std::min<std::size_t>(s.taps.size(), 0xffff)));
      }
    }
  }
}

// How rows divide into groups: as few products as may be, and of these as many phases of a channel
// as may be, which the epilogue stores together.
void group_rows(Schedule& s, Problem const& p, Shape const& shape) {
  int const phases = s.axes[2].phases;
  int64_t best = std::numeric_limits<int64_t>::max();
  int chosen = 1;
  for (int group = 1; group <= kMostPhases && phases % group == 0; group *= 2) {
    if (p.layout == Layout::kChannelsLast && kInstructionRows / group < kWarpRows) break;
    s.group_phases = group;
    list_taps(s);
    int64_t const products =
        int64_t(s.taps.size()) * ceil_div(p.output_channels, kInstructionRows / group);
    if (products > best) continue;
    best = products;
    chosen = group;
  }
  s.group_phases = chosen;
  s.group_channels = kInstructionRows / chosen;
  s.channel_blocks = int(ceil_div(p.output_channels, s.group_channels));
  list_taps(s);
  int const sets = phases / chosen;
  s.joins_groups = shape.row_groups > 1 && sets % shape.row_groups == 0 &&
                   chosen * shape.row_groups <= kMostJoined;
  s.joined_groups = s.joins_groups ? shape.row_groups : 1;
  s.phase_sets = sets / s.joined_groups;
  s.units = s.channel_blocks * s.phase_sets * s.axes[1].phases * s.axes[0].phases;
  int const consumer_units = s.joins_groups ? 1 : shape.row_groups;
  s.shares_rows = s.units <= consumer_units || s.joins_groups;
  s.block_units = consumer_units * (s.shares_rows ? 1 : kConsumers);
  s.blocks_m = int(ceil_div(s.units, s.block_units));
  // Most taps of a block's row groups.
  int const lists = int(s.first_tap.size()) - 1;
  auto const count = [&](int list) { return s.first_tap[list + 1] - s.first_tap[list]; };
  for (int block = 0; block < s.blocks_m; ++block) {
    int total = 0;
    for (int i = 0; i < s.block_units; ++i) {
      int const unit = block * s.block_units + i;
      if (unit >= s.units) break;
      int const first = unit / s.channel_blocks * s.joined_groups;
      for (int group = 0; group < s.joined_groups; ++group) {
        if (first + group < lists) total += count(first + group);
      }
    }
    s.block_taps = std::max(s.block_taps, total);
    s.mean_taps += double(total) * (s.shares_rows ? kConsumers : 1) / s.blocks_m;
  }
}

// Of the filter's ring, whatever the chunks are.
constexpr int kFewestSlots = 8;  // of whole chunks
constexpr int kFewestFilterBytes = kFewestSlots * kInstructionRows * kMostPieces * 16;

std::vector<int> extents(int whole, int most) {
  std::vector<int> result;
  for (int parts = 1; parts <= whole; ++parts) {
    int const extent = int(ceil_div(whole, parts));
    if (extent <= most && (result.empty() || result.back() != extent)) result.push_back(extent);
  }
  return result;
}

// Chooses the tile for a number of columns; false where none fits. most: staged positions.
bool lay_out(Schedule& s, int columns, int mma_columns, int vector, int most) {
  auto const& axes = s.axes;
  auto const reach = [&](int i) { return axes[i].highest - axes[i].lowest; };
  bool const line = [&] {
    for (Axis const& axis : axes) {
      if (axis.lowest != 0 || axis.highest != 0 || axis.positions != axis.problem.input) {
        return false;
      }
    }
    return true;
  }();
  if (line) {
    if (columns > most) return false;
    int const plane = axes[0].positions * axes[1].positions * axes[2].positions;
    s.order = Order::kLine;
    s.tile = s.box = {1, 1, columns};
    s.tiles = {1, 1, int(ceil_div(plane, columns))};
    s.lead = 0;
    s.positions = columns;
    return true;
  }
  double best = std::numeric_limits<double>::max();
  double const taps = double(std::max<std::size_t>(1, s.taps.size())) / s.blocks_m;
  auto const consider = [&](Order order, std::array<int, kMaxAxes> const& tile) {
    std::array<int, kMaxAxes> tiles{}, box{};
    for (int i = 0; i < kMaxAxes; ++i) {
      tiles[i] = int(ceil_div(axes[i].positions, tile[i]));
      box[i] = tile[i] + reach(i);
    }
    int const lead = floor_mod(axes[2].lowest, vector);
    box[2] = int(round_up(lead + box[2], vector));
    int const staged = box[0] * box[1] * box[2];
    int const lines = (tile[0] - 1) * box[1] + tile[1];
    int const used = order == Order::kBoxes ? (lines - 1) * box[2] + tile[2] : lines * 8;
    if (staged > most || used > (order == Order::kStrips ? mma_columns : columns)) return;
    if (tiles[2] > 1 && tile[2] % vector != 0) return;
    // Instructions read whole sets of columns, to no effect beyond the tile: that stays within the
    // box and the filter's ring behind it.
    int const beside = order == Order::kStrips ? columns / mma_columns * 8 : 8;
    int const rows = (order == Order::kStrips ? mma_columns : columns) / 8;
    int const read = order == Order::kBoxes ? columns : (rows - 1) * box[2] + beside;
    int const furthest = (reach(0) * box[1] + reach(1)) * box[2] + reach(2);
    if (lead + furthest + read > staged + kFewestFilterBytes / 16) return;
    double const cost = double(tiles[0]) * tiles[1] * tiles[2] *
                        (columns * (taps + kEpilogueTaps) + kStagingCost * staged);
    if (cost >= best) return;
    best = cost;
    s.order = order;
    s.tile = tile;
    s.tiles = tiles;
    s.box = box;
    s.lead = lead;
    s.positions = staged;
  };
  for (int th : extents(axes[1].positions, columns)) {
    for (int td : extents(axes[0].positions, std::max(1, columns / th))) {
      consider(Order::kEights, {td, th, 8});
      for (int strips = 2; strips <= columns / mma_columns; strips *= 2) {
        consider(Order::kStrips, {td, th, 8 * strips});
      }
      for (int tw : extents(axes[2].positions, std::max(1, columns / (th * td)))) {
        consider(Order::kBoxes, {td, th, tw});
        consider(Order::kBoxes, {td, th, std::max(vector, tw / vector * vector)});
      }
    }
  }
  return best < std::numeric_limits<double>::max();
}

}  // namespace

Memory Memory::of(int positions, int pieces, int stages, int slots, Math math, Shape const& shape) {
  MathTraits const& traits = traits_of(math);
  int const element = traits.element_bytes();
  Memory m;
  m.box_bytes = positions * pieces * 16 * traits.parts;
  m.slot_bytes = kInstructionRows * pieces * 16 * traits.parts;
  m.warp_bytes = shape.row_groups * element *
                 std::max(group_values(false, element), group_values(true, element));
  m.inputs = kBarrierBytes;
  m.columns = m.inputs + int(round_up(2 * positions * int(sizeof(int)), 128));
  m.values = m.columns + kConsumers * shape.columns * 2 * int(sizeof(int));
  m.boxes = int(round_up(m.values + kConsumers * 4 * m.warp_bytes, 128));
  m.filter = int(round_up(m.boxes + stages * m.box_bytes, 128));
  m.end = m.filter + slots * m.slot_bytes;
  return m;
}

Schedule schedule_of(Problem const& p, Math math, Shape const& shape, Device const& device) {
  Schedule s;
  MathTraits const& traits = traits_of(math);
  int const element = traits.element_bytes();
  int const vector = 16 / element;
  int64_t input = int64_t(p.channels) * p.groups, output = int64_t(p.output_channels) * p.groups;
  int64_t lists = 1;
  for (int i = 0; i < kMaxAxes; ++i) {
    if (p.axes[i].stride > kMaxPhaseStride) {
      return refused(detail::join("its stride is ", p.axes[i].stride, ", up to ", kMaxPhaseStride,
                                  " is served"));
    }
    s.axes[i] = Axis::of(p.axes[i]);
    input *= p.axes[i].input;
    output *= p.axes[i].output;
    lists *= s.axes[i].phases;
    constexpr int kFar = 1 << 14;
    if (s.axes[i].lowest < -kFar || s.axes[i].highest > kFar) {
      return refused("its taps reach too far");
    }
  }
  constexpr int64_t kMostElements = 0x7fffffff;
  if (input > kMostElements || output > kMostElements) {
    return refused(detail::join("a sample's input has ", input, " elements and its output ", output,
                                ", at most ", kMostElements, " are served"));
  }
  if (lists > kMostLists) {
    return refused(
        detail::join("it has ", lists, " sub-pixel phases, at most ", kMostLists, " are served"));
  }
  group_rows(s, p, shape);
  if (s.taps.size() > kMostTaps) {
    return refused(detail::join("its phases have ", s.taps.size(), " taps, at most ", kMostTaps,
                                " are served"));
  }
  bool const last = p.layout == Layout::kChannelsLast;
  bool const pairs = !last && element == 2 && p.axes[2].input % 2 == 0;
  s.loads = last && p.channels % vector == 0 && p.aligned ? Loads::kChannels
            : pairs && p.aligned                          ? Loads::kPlanes
                                                          : Loads::kElements;
  int const columns = s.loads == Loads::kPlanes ? 2 : 1;
  int most_pieces = 2;
  while (most_pieces < kMostPieces && most_pieces * 16 < p.channels * element) most_pieces *= 2;
  // Large chunks first; less where the box would leave no room.
  for (int pieces = most_pieces; pieces >= 2; pieces /= 2) {
    auto const fits = [&](int positions, int stages, int slots) {
      return Memory::of(positions, pieces, stages, slots, math, shape).end <= device.shared_bytes;
    };
    constexpr int kFewestStages = 2;
    int const slots_wanted = kFewestSlots * (kMostPieces / pieces) / traits.parts;
    int most = 8192;
    while (most > 8 && !fits(most, kFewestStages, slots_wanted)) most -= 8;
    if (!lay_out(s, s.tile_columns(shape), shape.mma_columns(), columns, most)) continue;
    // Odd: pieces of a position are in different banks.
    s.positions |= 1;
    if (!fits(s.positions, kFewestStages, slots_wanted)) continue;
    s.pieces = pieces;
    s.chunks = int(ceil_div(int64_t(p.channels) * element, pieces * 16));
    s.stages = kFewestStages;
    s.slots = slots_wanted;
    while (s.stages < 3 && fits(s.positions, s.stages + 1, s.slots)) ++s.stages;
    while (2 * s.slots <= kMostSlots && fits(s.positions, s.stages, 2 * s.slots)) s.slots *= 2;
    while (s.stages < kMostStages && fits(s.positions, s.stages + 1, s.slots)) ++s.stages;
    Memory const memory = Memory::of(s.positions, pieces, s.stages, s.slots, math, shape);
    s.shared_bytes = memory.end;
    s.filter_bytes = int64_t(p.groups) * s.blocks_m * s.chunks * s.block_taps * memory.slot_bytes;
    return s;
  }
  return refused("no tile's input fits the shared memory of a multiprocessor");
}

}  // namespace fusedconv::conv::taps::sm90
