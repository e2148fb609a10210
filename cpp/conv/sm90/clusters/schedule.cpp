#include "conv/sm90/clusters/schedule.hpp"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90::clusters {
namespace {

// Cycles: of a block beside all else, of a chunk on its way and of a byte of it, of a warp's tile
// of products, of a step of it and of each tile of columns in a step (of 16 bits and one product),
// of a round of outputs that all threads finish, and of an output that is exchanged. Fitted to 40
// times of 28 problems on an H200, by 8 % on average, but for bytes, which say what they must.
constexpr double kBlock = 5000.0;
constexpr double kChunk = 6700.0;
constexpr double kByte = 0.045;
constexpr double kUnit = 1400.0;
constexpr double kStep = 123.0;
constexpr double kTile = 28.5;
constexpr double kRound = 1120.0;
constexpr double kOutput = 0.4;
constexpr double kOthers = 0.25;
// Of a block's shared memory beside what is laid out here: partial moments, statistics.
constexpr int kReservedBytes = 2048;
// Pixels and taps of a sample's part are counted in 32 bits, and blocks are small.
constexpr int64_t kMostExtent = 1 << 20;
constexpr int kMostChannels = 1 << 16;

Schedule refused(std::string reason) {
  Schedule result;
  result.support = Support::no(std::move(reason));
  return result;
}

int64_t product(std::array<Axis, kMaxAxes> const& axes, int AxisProblem::* field) {
  int64_t result = 1;
  for (Axis const& axis : axes) result *= axis.problem.*field;
  return result;
}

// Positions of a slab.
int64_t rows_of(Schedule const& s) {
  int64_t rows = 1;
  for (int i = 0; i < kMaxAxes; ++i) rows *= i == s.outer ? s.slab : s.axes[i].positions;
  return rows;
}

// Taps of all tiles of rows of a slab.
int64_t tile_taps_of(Schedule const& s) {
  int64_t taps = 1;
  for (Axis const& axis : s.axes) {
    int64_t own = 0;
    for (int residue = 0; residue < axis.phases; ++residue) own += axis.phase(residue).taps;
    taps *= own;
  }
  return ceil_div(rows_of(s), kTileRows) * taps;
}

struct Considered {
  Problem const& p;
  int element;
  int parts;  // of a product
  bool normalises;
  Device const& device;
};

// Lays out the shared memory of a block; false where that does not fit.
bool fits(Schedule& s, Considered const& of) {
  int64_t const taps = product(s.axes, &AxisProblem::kernel);
  bool const last = of.p.layout == Layout::kChannelsLast;
  Memory m;
  m.pitch = Memory::odd_pitch(int64_t(s.chunk) * of.element);
  m.raw_weight_pitch = Memory::odd_pitch(taps * s.columns * of.element);
  m.raw_input_pitch = last ? 0 : Memory::odd_pitch(int64_t(s.box) * of.element);
  int64_t const filter = taps * s.tap_rows() * m.pitch;
  int64_t const input = int64_t(s.box + 1) * m.pitch;
  // Channels last, copies bring the next chunk's pixels while this one's are multiplied.
  bool const twice = last && s.chunks > 1;
  int64_t const raw = int64_t(s.chunk) * (m.raw_weight_pitch + m.raw_input_pitch);
  int64_t const sums = round_up(int64_t(s.slab_outputs) * s.columns * int64_t(sizeof(float)), 16);
  int64_t const rows = filter + (twice ? 2 : 1) * input;
  // A single chunk is turned before there are sums.
  int64_t const columns = rows + (s.chunks > 1 ? raw + sums : std::max(raw, sums));
  int64_t const spare = columns + round_up(s.columns * Memory::kColumnBytes, 16);
  int64_t const end = spare + 16;
  if (end > of.device.shared_bytes - kReservedBytes) return false;
  m.input = int(filter);
  m.next_input = twice ? int(input) : 0;
  m.raw = int(rows);
  m.sums = int(s.chunks > 1 ? rows + raw : rows);
  m.columns = int(columns);
  m.spare = int(spare);
  m.end = int(end);
  s.memory = m;
  return true;
}

// Lays out a cluster of slabs x shares blocks; false where it has blocks without work, or the
// device no room for it.
bool lay_out(Schedule& s, Considered const& of) {
  Axis const& outer = s.axes[s.outer];
  s.slab = int(ceil_div(outer.positions, s.slabs));
  if ((s.slabs - 1) * s.slab >= outer.positions) return false;
  int const step = kStepBytes / of.element;
  int const channels = of.p.channels;
  s.share_channels = int(round_up(ceil_div(channels, s.shares), step));
  if ((s.shares - 1) * s.share_channels >= channels) return false;

  int64_t const inner_inputs = product(s.axes, &AxisProblem::input) / outer.problem.input;
  int64_t const inner_outputs = product(s.axes, &AxisProblem::output) / outer.problem.output;
  int const reach = s.slab + outer.highest - outer.lowest;
  s.box = int((s.slabs > 1 ? std::min(outer.problem.input, reach) : outer.problem.input) *
              inner_inputs);
  int64_t const output_lines =
      std::min<int64_t>(int64_t(s.slab) * outer.problem.stride, outer.problem.output);
  s.slab_outputs = int(output_lines * inner_outputs);
  // The fewest chunks; a step at a time would be the most.
  s.chunks = s.share_channels / step;
  s.chunk = step;
  if (!fits(s, of)) return false;
  for (s.chunks = 1;; ++s.chunks) {
    s.chunk = int(round_up(ceil_div(s.share_channels, s.chunks), step));
    if (fits(s, of)) break;
  }
  s.shared_bytes = s.memory.end;

  int const groups = s.padded_columns / kTileColumns / s.tiles;
  int64_t phases = 1;
  for (Axis const& axis : s.axes) phases *= axis.phases;
  auto const rounds = [](int64_t count, int workers) { return double(ceil_div(count, workers)); };
  double const steps = rounds(tile_taps_of(s) * groups, kWarps) * (s.share_channels / step);
  double const instructions = (of.parts == 2 ? 3.0 : 1.0) * (of.element == 4 ? 2.0 : 1.0);
  int64_t const outputs = int64_t(s.slab_outputs) * s.columns;
  double const rows = double(s.box) + double(product(s.axes, &AxisProblem::kernel)) * s.columns;
  s.block_cycles =
      kBlock + s.chunks * kChunk + rows * s.share_channels * of.element * kByte +
      rounds(ceil_div(rows_of(s), kTileRows) * phases * groups, kWarps) * kUnit +
      steps * (kStep + kTile * instructions * s.tiles) +
      rounds(ceil_div(outputs, s.shares), kThreads) * kRound * (of.normalises ? 2.0 : 1.0) +
      double(outputs) * kOutput;
  // Clusters lie in groups of multiprocessors, of which some are left over. On an H200 there is
  // room for 15 of 8 blocks, on 132 multiprocessors.
  constexpr double kUsed = 0.92;
  int const held = int(of.device.multiprocessors * (s.blocks() > 1 ? kUsed : 1.0)) / s.blocks();
  int const residents = std::min(kMostResident, of.device.shared_bytes / (s.shared_bytes + 1024));
  if (held == 0) return false;
  s.resident = held * std::max(1, residents);
  return true;
}

// More first.
std::vector<int> column_choices(int channels, int group_channels) {
  if (group_channels > 0) return {group_channels};
  std::vector<int> result;
  // Fewer than a tile are padding, and many samples pay for it.
  int const fewest = std::min(channels, kTileColumns);
  for (int columns = std::min(channels, kMostColumns); columns >= fewest; --columns) {
    if (channels % columns == 0) result.push_back(columns);
  }
  return result;
}

}  // namespace

Schedule schedule_of(Problem const& p, int group_channels, Math math, Device const& device) {
  if (p.groups != 1) return refused(detail::join("the convolution has ", p.groups, " groups"));
  if (group_channels > kMostColumns) {
    return refused(detail::join("a group of ", group_channels, " channels is normalised, up to ",
                                kMostColumns, " are"));
  }
  if (std::max(p.channels, p.output_channels) > kMostChannels) {
    return refused(detail::join("it has ", p.channels, " input and ", p.output_channels,
                                " output channels, up to ", kMostChannels, " are served"));
  }
  Schedule s;
  for (int i = 0; i < kMaxAxes; ++i) {
    if (p.axes[i].stride > kMaxStride) {
      return refused(
          detail::join("its stride is ", p.axes[i].stride, ", up to ", kMaxStride, " is served"));
    }
    s.axes[i] = Axis::of(p.axes[i]);
  }
  int64_t const inputs = product(s.axes, &AxisProblem::input);
  int64_t const outputs = product(s.axes, &AxisProblem::output);
  int64_t const taps = product(s.axes, &AxisProblem::kernel);
  if (std::max({inputs, outputs, taps}) > kMostExtent) {
    return refused(detail::join("a sample of ", inputs, " pixels makes ", outputs, " by ", taps,
                                " taps; up to ", kMostExtent, " are served"));
  }
  int phases = 0;
  for (Axis const& axis : s.axes) phases += std::min(axis.phases, kMostPhases);
  if (phases > kMostPhases) {
    return refused(detail::join("its axes have more than ", kMostPhases, " sub-pixel phases"));
  }
  // The first axis that is more than a pixel: what lies in front of it does not divide.
  while (s.outer < kMaxAxes - 1 && p.axes[s.outer].input == 1 && p.axes[s.outer].output == 1) {
    ++s.outer;
  }

  std::vector<int> const choices = column_choices(p.output_channels, group_channels);
  if (choices.empty()) {
    return refused(detail::join(p.output_channels,
                                " output channels divide into no equal parts of ", kTileColumns,
                                " to ", kMostColumns));
  }
  Considered const of{p, traits_of(math).element_bytes(), traits_of(math).parts, group_channels > 0,
                      device};
  double best = std::numeric_limits<double>::max();
  Schedule result = s;
  for (int const columns : choices) {
    s.columns = columns;
    s.column_blocks = p.output_channels / columns;
    s.padded_columns = int(round_up(columns, kTileColumns));
    for (s.tiles = kMostTiles; s.padded_columns / kTileColumns % s.tiles != 0;) s.tiles /= 2;
    for (s.slabs = 1; s.slabs <= kMostBlocks; s.slabs *= 2) {
      for (s.shares = 1; s.slabs * s.shares <= kMostBlocks; s.shares *= 2) {
        Schedule candidate = s;
        if (!lay_out(candidate, of)) continue;
        // Of a sample alone: the batch has no say, or a sample's sums would depend on it.
        double const clusters = candidate.column_blocks;
        double const waves = double(ceil_div(candidate.column_blocks, candidate.resident));
        // What it takes from further samples counts a little.
        double const cost =
            candidate.block_cycles * (waves + kOthers * clusters / candidate.resident);
        if (cost >= best) continue;
        best = cost;
        result = candidate;
      }
    }
  }
  if (best == std::numeric_limits<double>::max()) {
    return refused(
        "a sample's output channels, or those that are normalised together, do not fit the shared "
        "memory of a cluster");
  }
  return result;
}

}  // namespace fusedconv::conv::sm90::clusters
