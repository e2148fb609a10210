#include "conv/sm90/boxes/schedule.hpp"

#include <algorithm>
#include <bit>
#include <limits>
#include <map>
#include <numeric>
#include <utility>

#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90::boxes {
namespace {

Schedule refused(std::string reason) {
  Schedule result;
  result.support = Support::no(std::move(reason));
  return result;
}

// The input positions less q that a phase's taps meet, those of an axis outermost first.
std::vector<Tap> taps_of(std::array<Axis, kMaxAxes> const& axes, Residues const& residue) {
  std::vector<Tap> result{Tap{}};
  for (int a = 0; a < kMaxAxes; ++a) {
    Phase const phase = axes[a].phase(residue[a]);
    std::vector<Tap> longer;
    for (Tap const& tap : result) {
      for (int j = 0; j < phase.taps; ++j) {
        Tap next = tap;
        next[a] = int16_t(phase.shift - j * axes[a].sub_dilation);
        longer.push_back(next);
      }
    }
    result = std::move(longer);
  }
  return result;
}

// Appends sets of `together` of the phases in turn, which read what any of them reads.
void append_sets(Schedule& s, std::vector<Residues> const& phases, int together) {
  for (std::size_t first = 0; first < phases.size(); first += together) {
    int const count = int(std::min(phases.size() - first, std::size_t(together)));
    std::map<Tap, uint16_t> taps;
    for (int i = 0; i < count; ++i) {
      for (Tap const& tap : taps_of(s.axes, phases[first + i])) taps[tap] |= uint16_t(1 << i);
    }
    s.sets.push_back({.first = int(s.phases.size()),
                      .count = count,
                      .first_tap = int(s.taps.size()),
                      .taps = int(taps.size())});
    s.phases.insert(s.phases.end(), phases.begin() + first, phases.begin() + first + count);
    for (auto const& [tap, mask] : taps) {
      s.taps.push_back(tap);
      s.masks.push_back(mask);
    }
  }
}

// Groups the phases: by what they read where a row has one segment, else by neighbours. What
// gathers has one.
void group_phases(Schedule& s, Shape const& shape) {
  if (s.direction == Direction::kGathers) {
    int const taps = int(s.taps.size());
    s.phases = {Residues{}};
    s.masks.assign(taps, 1);
    s.sets = {{.count = 1, .taps = taps, .rows = taps * shape.columns}};
    return;
  }
  std::vector<Residues> all;
  for (int z = 0; z < s.axes[0].phases; ++z) {
    for (int y = 0; y < s.axes[1].phases; ++y) {
      for (int x = 0; x < s.axes[2].phases; ++x) all.push_back({z, y, x});
    }
  }
  if (shape.segments > 1) {
    append_sets(s, all, shape.segments);
  } else {
    std::map<std::vector<Tap>, std::vector<Residues>> alike;
    for (auto const& residue : all) alike[taps_of(s.axes, residue)].push_back(residue);
    for (auto const& [taps, phases] : alike) append_sets(s, phases, shape.columns / s.segment);
  }
  for (PhaseSet& set : s.sets) {
    for (int tap = set.first_tap; tap < set.first_tap + set.taps; ++tap) {
      set.rows += shape.segments == 1 ? shape.columns
                                      : std::popcount(s.masks[tap]) * shape.segment_columns();
    }
  }
  std::stable_sort(s.sets.begin(), s.sets.end(),
                   [](PhaseSet const& a, PhaseSet const& b) { return a.rows > b.rows; });
  int rows = 0;
  for (PhaseSet& set : s.sets) {
    set.first_row = rows;
    rows += set.rows;
  }
}

// Which tap of the filter each phase of a set has where it has a tap of the set.
void list_filter_taps(Schedule& s) {
  s.first_filter_taps.resize(s.taps.size());
  for (PhaseSet const& set : s.sets) {
    for (int tap = set.first_tap; tap < set.first_tap + set.taps; ++tap) {
      s.first_filter_taps[tap] = uint16_t(s.filter_taps.size());
      for (int i = 0; i < set.count; ++i) {
        if ((s.masks[tap] >> i & 1) == 0) continue;
        int filter_tap = 0;
        for (int a = 0; a < kMaxAxes; ++a) {
          Axis const& axis = s.axes[a];
          Phase const phase = axis.phase(s.phases[set.first + i][a]);
          int const j = (phase.shift - s.taps[tap][a]) / axis.sub_dilation;
          filter_tap = filter_tap * axis.problem.kernel + phase.first_tap + j * axis.tap_step;
        }
        s.filter_taps.push_back(uint16_t(filter_tap));
      }
    }
  }
}

// Blocks of columns whose segments are of so many channels.
void divide_columns(Schedule& s, Shape const& shape, int channels, int segment) {
  s.segment = segment;
  s.channel_blocks = int(ceil_div(channels, segment));
  group_phases(s, shape);
  s.blocks = int(s.sets.size()) * s.channel_blocks;
}

// Whether a tap is that of all or none of each group of phases that are multiplied at once.
bool multiplies_alike(Shape const& shape, uint16_t mask) {
  int const group = (1 << shape.alike) - 1;
  for (int first = 0; shape.alike > 1 && first < shape.segments; first += shape.alike) {
    int const own = mask >> first & group;
    if (own != 0 && own != group) return false;
  }
  return true;
}

// Taps that the blocks of columns read, all together, and the blocks themselves, some without taps.
int64_t work_of(Schedule const& s) {
  int64_t work = 0;
  for (PhaseSet const& set : s.sets) work += 1 + set.taps;
  return work * s.channel_blocks;
}

// Boxes with halos of `most` positions at most: of as few slabs as there are, and of these the
// smallest. None where all have more.
Slabs halo_slabs(Schedule const& s, int64_t batch, int most) {
  Slabs best;
  int64_t fewest = std::numeric_limits<int64_t>::max();
  int const lines = s.positions / kHaloLine;
  std::array const upright{1, lines, kHaloLine, 1};
  // Of larger ones the others' copies, and boxes of several samples, would be larger than most.
  bool const all = s.positions == kSlab;
  for (std::array<int, kMaxAxes + 1> const& box :
       {std::array{1, 1, s.positions, 1}, upright, std::array{lines, 1, kHaloLine, 1},
        std::array{1, 1, kHaloLine, lines}}) {
    if (box[kMaxAxes] > batch || (!all && box != upright)) continue;
    Slabs slabs;
    slabs.box = box;
    slabs.reach = s.reach;
    for (int axis = 0; axis < kMaxAxes; ++axis) {
      slabs.count[axis] = int(ceil_div(s.axes[axis].positions, box[axis]));
    }
    slabs.count[kMaxAxes] = int(ceil_div(batch, box[kMaxAxes]));
    if (slabs.copied() > most || slabs.all() > fewest) continue;
    if (slabs.all() == fewest && slabs.copied() >= best.copied()) continue;
    fewest = slabs.all();
    best = slabs;
  }
  return best;
}

// Those of twice a slab at most, where there are any: a few slabs less are not worth larger ones.
Slabs halo_slabs(Schedule const& s, int64_t batch) {
  Slabs const small = halo_slabs(s, batch, 2 * s.positions);
  return small.positions() == s.positions ? small
                                          : halo_slabs(s, batch, std::numeric_limits<int>::max());
}

// How far boxes with halos reach along height and width, for all taps of a plane, and what room
// they take.
Support add_halos(Schedule& s) {
  for (PhaseSet& set : s.sets) {
    for (int axis = 1; set.taps > 0 && axis < kMaxAxes; ++axis) {
      int low = s.taps[set.first_tap][axis], high = low;
      for (int tap = set.first_tap; tap < set.first_tap + set.taps; ++tap) {
        low = std::min<int>(low, s.taps[tap][axis]);
        high = std::max<int>(high, s.taps[tap][axis]);
      }
      set.lowest[axis] = int16_t(low);
      s.reach[axis] = std::max(s.reach[axis], high - low);
    }
  }
  constexpr int kMostReach = kMostBoxExtent - kSlab;
  if (int const reach = std::max(s.reach[1], s.reach[2]); reach > kMostReach) {
    return Support::no(detail::join("its taps reach ", reach, " positions further along an axis, ",
                                    kMostReach, " are served with one box"));
  }
  // One of a sample and one of several are the largest of any batch's.
  for (int const batch : {1, kSlab / kHaloLine}) {
    int const rows = halo_slabs(s, batch).copied();
    s.halo_bytes = std::max(s.halo_bytes, int(round_up(rows * kChunkBytes, kSwizzleBytes)));
  }
  return Support::yes();
}

// Of the ring. Boxes alone are short steps: with six or four of them under way, copies are waited
// for, and rows whose filter is copied are quicker.
int fewest_stages(Shape const& shape) {
  return shape.stationary ? kMostStages : shape.halo ? 3 : 2;
}

// Of a slab's lines, `most` positions at most. Channels first they are powers of two, as the
// copies' swizzles and the instruction's operand are.
template <class F>
void each_width(int whole, int most, Layout layout, F&& body) {
  if (layout == Layout::kChannelsLast) {
    // Of those of as many slabs the narrowest, the widest of these first.
    for (int width = std::min(whole, most); width > 0; --width) {
      width = int(ceil_div(whole, ceil_div(whole, width)));
      body(width);
    }
    return;
  }
  for (int width = kSlab; width >= kFewestLine; width /= 2) {
    if (width <= most) body(width);
  }
}

}  // namespace

Slabs Schedule::slabs(int64_t batch, int most) const {
  FUSEDCONV_CHECK(batch > 0, "sm90_boxes: batch: got ", batch, ", expected a positive number");
  if (halo_bytes > 0) return halo_slabs(*this, batch);
  std::array<int, kMaxAxes> const whole{axes[0].positions, axes[1].positions, axes[2].positions};
  Slabs best;
  int64_t fewest = std::numeric_limits<int64_t>::max();
  for (int d = 1; d <= std::min(whole[0], most); ++d) {
    for (int h = 1; h <= std::min(whole[1], most / d); ++h) {
      each_width(whole[2], most / (d * h), layout, [&](int w) {
        // The fewest along the batch, of as few samples each as make no more.
        int64_t const count = ceil_div(batch, std::min<int64_t>(batch, most / (d * h * w)));
        Slabs slabs;
        slabs.box = {d, h, w, int(ceil_div(batch, count))};
        slabs.count = {int(ceil_div(whole[0], d)), int(ceil_div(whole[1], h)),
                       int(ceil_div(whole[2], w)), int(count)};
        if (slabs.all() >= fewest) return;
        fewest = slabs.all();
        best = slabs;
      });
    }
  }
  return best;
}

Slabs Schedule::sample_slabs(int64_t batch) const {
  Slabs result = slabs(1);
  result.count[kMaxAxes] = int(batch);
  return result;
}

Support gather_taps(Problem const& p, Schedule& s) {
  s.taps = {Tap{}};
  std::vector<Residues> read = {Residues{}};  // by tap
  for (int a = 0; a < kMaxAxes; ++a) {
    AxisProblem const& axis = p.axes[a];
    std::vector<Tap> longer;
    std::vector<Residues> longer_read;
    for (std::size_t tap = 0; tap < s.taps.size(); ++tap) {
      for (int t = 0; t < axis.kernel; ++t) {
        int const reached = axis.dilation * t - axis.padding;
        int const residue = (reached % axis.stride + axis.stride) % axis.stride;
        if (residue >= axis.input) {
          return Support::no(detail::join("its input of ", axis.input, " is shorter than phase ",
                                          residue, " of its stride"));
        }
        longer.push_back(s.taps[tap]);
        longer.back()[a] = int16_t((reached - residue) / axis.stride);
        longer_read.push_back(read[tap]);
        longer_read.back()[a] = residue;
      }
    }
    s.taps = std::move(longer);
    read = std::move(longer_read);
  }
  for (Residues const& residues : read) {
    auto const found = std::find(s.sources.begin(), s.sources.end(), residues);
    s.tap_sources.push_back(uint8_t(found - s.sources.begin()));
    if (found == s.sources.end()) s.sources.push_back(residues);
    if (s.sources.size() > kMostPhases) {
      return Support::no(
          detail::join("its taps read more than ", kMostPhases, " phases of the input"));
    }
  }
  return Support::yes();
}

Schedule schedule_of(Problem const& p, Direction direction, Math math, Shape const& shape,
                     Device const& device) {
  Schedule s;
  bool const gathers = direction == Direction::kGathers;
  s.direction = direction;
  s.positions = shape.positions;
  int const element = traits_of(math).element_bytes();
  bool const last = p.layout == Layout::kChannelsLast;
  s.layout = p.layout;
  if (last && shape.planes) return refused("it reads channels first");
  if (gathers && (!last || shape.segments > 1)) {
    return refused("it gathers channels last to whole blocks of channels alone");
  }
  if (!last && shape.segments == 1) return refused("it writes channels last");
  if (last && shape.alike > 1) return refused("it writes channels first");
  if (shape.filter_first()) {
    if (!last) return refused("its output is channels last");
    for (AxisProblem const& axis : p.axes) {
      if (axis.stride == 1) continue;
      return refused(detail::join("its stride is ", axis.stride, ", 1 is served"));
    }
  } else if (gathers && shape.halo) {
    return refused("it scatters");
  }
  if (!last && shape.segments != p.axes[2].stride) {
    return refused(detail::join("its stride along width is ", p.axes[2].stride, ", ",
                                shape.segments, " is served channels first"));
  }
  if (p.groups != 1) return refused(detail::join("it has ", p.groups, " groups, 1 is served"));
  if (!p.aligned) return refused("its input is not aligned to 16 bytes");
  auto const whole = [&](int elements) { return int64_t(elements) * element % 16 == 0; };
  for (int const channels : {shape.planes ? 0 : p.channels, last ? p.output_channels : 0}) {
    if (!whole(channels)) {
      return refused(detail::join("a pixel of ", channels, " channels is not whole 16 bytes"));
    }
  }
  for (int const columns : {shape.planes ? p.axes[2].input : 0, last ? 0 : p.axes[2].output}) {
    if (!whole(columns)) {
      return refused(detail::join("a line of ", columns, " pixels is not whole 16 bytes"));
    }
  }
  int phases = 1;
  for (int i = 0; i < kMaxAxes; ++i) {
    if (p.axes[i].stride > kMaxStride) {
      return refused(
          detail::join("its stride is ", p.axes[i].stride, ", up to ", kMaxStride, " is served"));
    }
    constexpr int kFar = 1 << 14;
    if (gathers) {
      AxisProblem const& axis = p.axes[i];
      int64_t const reach = int64_t(axis.dilation) * (axis.kernel - 1) - axis.padding;
      if (axis.padding > kFar || reach > kFar) return refused("its taps reach too far");
      s.axes[i] = Axis::of({.input = axis.output, .output = axis.output});
      continue;
    }
    s.axes[i] = Axis::of(p.axes[i]);
    phases *= std::min(s.axes[i].phases, kMostPhases + 1);
    if (s.axes[i].lowest < -kFar || s.axes[i].highest > kFar) {
      return refused("its taps reach too far");
    }
  }
  if (phases > kMostPhases) {
    return refused(
        detail::join("it has ", phases, " sub-pixel phases, at most ", kMostPhases, " are served"));
  }
  if (p.axes[2].output < p.axes[2].stride && !last) return refused("its output is too narrow");
  int64_t filter_taps = 1;
  for (AxisProblem const& axis : p.axes) filter_taps *= axis.kernel;
  if (filter_taps > kMostFilterTaps) {
    return refused(
        detail::join("it has ", filter_taps, " taps, at most ", kMostFilterTaps, " are served"));
  }
  if (gathers) {
    if (Support const support = gather_taps(p, s); !support) return refused(support.reason);
  }
  int const channels = int(round_up(p.output_channels, kGranule));
  if (shape.segments > 1) {
    divide_columns(s, shape, channels, shape.segment_columns());
  } else if (shape.filter_first()) {
    divide_columns(s, shape, channels, shape.columns);
  } else {
    // Several phases of some channels may leave fewer columns unused than one phase of more.
    int64_t least = std::numeric_limits<int64_t>::max();
    Schedule best;
    for (int most = shape.columns; most >= kFewestSegment; most /= 2) {
      Schedule candidate = s;
      divide_columns(candidate, shape, channels, std::min(channels, most));
      int64_t const work = work_of(candidate);
      if (work >= least) continue;
      least = work;
      best = candidate;
    }
    s = best;
  }
  for (uint16_t const mask : s.masks) {
    if (!multiplies_alike(shape, mask)) {
      return refused(detail::join("of ", shape.alike, " neighbouring phases some have other taps"));
    }
  }
  if (s.taps.size() > kMostTaps) {
    return refused(detail::join("its phases read ", s.taps.size(), " boxes, at most ", kMostTaps,
                                " are served"));
  }
  if (shape.planes) {
    for (Tap const& tap : s.taps) {
      // A copy starts at whole 16 bytes.
      if (!whole(tap[kMaxAxes - 1])) return refused("its taps lie beside each other along width");
    }
  }
  if (shape.halo) {
    if (Support const support = add_halos(s); !support) return refused(support.reason);
  }
  s.store_columns = kChunkBytes / element;
  if (last) {
    while (s.segment % s.store_columns != 0) s.store_columns /= 2;
  } else {
    s.store_positions = shape.plane_positions(element);
    s.store_columns = shape.plane_columns(kChunkBytes / element) / shape.segments;
  }
  if (!gathers) list_filter_taps(s);
  if (has_filter_lines(direction, element)) {
    // Copies of a weight as it lies want output channels of whole lines.
    s.line = std::gcd(std::gcd(s.segment, channels), kMostLine);
  }
  s.chunks = int(ceil_div(int64_t(p.channels) * element, kChunkBytes));
  if (shape.stationary) {
    if (s.blocks > device.multiprocessors) {
      return refused(detail::join("it has ", s.blocks, " blocks of columns, of which each is for ",
                                  "one or more of ", device.multiprocessors, " multiprocessors"));
    }
    for (PhaseSet const& set : s.sets) {
      s.kept_bytes =
          int(std::max<int64_t>(s.kept_bytes, int64_t(set.rows) * s.chunks * kChunkBytes));
    }
  }
  s.stages = kMostStages;
  int const most_bytes = device.shared_bytes_of(shape.residents);
  while (s.stages > 0 && Memory::of(shape, s.stages, s.kept_bytes, s.halo_bytes).end > most_bytes)
    --s.stages;
  s.stages -= s.stages % shape.producers();
  if (shape.filter_first() && s.stages == 0) {  // nothing is in the ring
    return refused(detail::join("its filter of ", s.kept_bytes, " bytes and ", kHaloStages,
                                " boxes of ", s.halo_bytes,
                                " do not fit the shared memory of a multiprocessor"));
  }
  if (int const fewest = fewest_stages(shape); s.stages < fewest) {
    return refused(
        detail::join("its tiles do not fit the shared memory of a multiprocessor: ", s.stages,
                     " stages of the ring do, at least ", fewest, " are needed"));
  }
  s.shared_bytes = Memory::of(shape, s.stages, s.kept_bytes, s.halo_bytes).end;
  for (PhaseSet const& set : s.sets) {
    s.filter_bytes += int64_t(set.rows) * s.channel_blocks * s.chunks * kChunkBytes;
  }
  s.filter_pieces =
      filter_taps * s.segment * s.channel_blocks * s.chunks * (kChunkBytes / kPieceBytes);
  if (s.filter_pieces > kMostPieces) {
    return refused(detail::join("its packed filter has ", s.filter_pieces, " pieces of ",
                                kPieceBytes, " bytes, at most ", kMostPieces, " are served"));
  }
  return s;
}

}  // namespace fusedconv::conv::sm90::boxes
