#include "conv/sm90/runs/schedule.hpp"

#include <algorithm>
#include <string>

#include "conv/axis.hpp"
#include "conv/sm90/architecture.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90::runs {
namespace {

constexpr int kFewestStages = 2;
constexpr int kWantedStages = 3;
// Of a shared ring, whose consumers are in different places of it. In strict fp32, where a stage
// lasts three times as long, they are hardly.
constexpr int kWantedSharedStages = 4;
// How much more a filter that stays may cost than one that streams, whose bytes come again with
// every tile.
constexpr double kWorthStaying = 1.25;
// What a stage less than wanted costs, of all.
constexpr double kMissingStage = 0.2;
// What each stage saves, up to so many, that even boxes leave more room for: an epilogue then finds
// the next tile loaded. Six for three took 1.15 ms for 1.20 on an H200, of 258 x 258 outputs in
// bfloat16, with 2 % more tiles.
constexpr double kMoreStage = 0.02;
constexpr int kDeepRing = 6;
// What a line of a box takes to stage beside its columns, in columns: narrow boxes have many.
constexpr int kLineColumns = 8;
constexpr int kFar = 1 << 14;  // of a tap's input from a position

// Of a phase's axis whose output is the stride times the input.
Axis axis_of(Phases::Axis const& phase, int input) {
  return Axis::of({.input = input,
                   .output = input * phase.count,
                   .kernel = phase.kernel,
                   .stride = phase.count,
                   .padding = phase.padding});
}

Schedule refused(std::string reason) {
  Schedule result;
  result.support = Support::no(std::move(reason));
  return result;
}

// Strips of `quads`, with tiles of which a box takes at most `limit` bytes; no tiles if none does.
Tiling tiling_of(ConvProblem const& p, Math math, Window const& window, int strips, int quads,
                 int column0, int limit) {
  int const element = traits_of(math).element_bytes();
  int const unit = 16 / element;  // copies begin and end at multiples of 16 bytes
  int const k_block = kKBlockBytes / element;
  Tiling t;
  t.strips = strips;
  t.quads = quads;
  t.column0 = column0;
  t.lead = window.before > 0 ? unit : 0;
  t.columns = int(round_up(t.lead + t.width() + window.after, unit));
  // Channels then begin at odd multiples of 16 bytes, and lanes that read four channels of two
  // quads at once read different banks. Narrow strips are few.
  if (t.columns / unit % 2 == 0 && quads > 2) t.columns += unit;
  int const halo = p.dilation_h * (p.r - 1);
  for (t.tile_quads = std::min(kTileQuads, p.p * quads); t.tile_quads > 0; --t.tile_quads) {
    // Tiles of whole rows begin where a row does.
    int const rows =
        t.tile_quads % quads == 0 ? t.tile_quads / quads : (t.tile_quads + quads - 2) / quads + 1;
    t.lines = std::min(p.p, rows) + halo;
    t.bytes = t.lines * k_block * t.columns * element;
    if (t.bytes <= limit && t.lines <= kMaxTmaExtent) break;
  }
  if (t.tile_quads > 0) t.tiles = int(ceil_div(p.p * quads, t.tile_quads));
  return t;
}

// Chooses the width of strips: as few tiles as may be, for boxes that are not much larger. Returns
// what a slice costs, in tiles; 0 where no tiles fit. even_boxes: the last strip's, which narrow
// ones fill with more lines, are no larger than the others'.
double lay_out(Schedule& s, ConvProblem const& p, Math math, Window const& window, int limit,
               bool even_boxes) {
  int const quads = int(ceil_div(p.q, kQuad));
  int const unit = 16 / traits_of(math).element_bytes();
  double const staging = traits_of(math).parts == 2 ? 0.1 / 3 : 0.1;
  int least = 1, most = std::min(quads, kMostStripQuads);
  if (p.r == 1 && window.size() == 1) {
    // The filter reads a tile's own pixels alone: long copies, in strips of much the same width.
    int const even = int(ceil_div(quads, ceil_div(quads, kTileQuads)));
    least = most = std::min(quads, int(round_up(even, std::max(1, unit / kQuad))));
  } else if (p.p == 1) {
    most = std::min(quads, kTileQuads);  // a tile has no other row
  }
  double best = 0.0;
  for (int width = least; width <= most; ++width) {
    // A copy's first column must be a multiple of 16 bytes.
    if (width < quads && width * kQuad % unit != 0) continue;
    int const strips = quads / width, rest = quads % width;
    std::array<Tiling, 2> tilings;
    tilings[0] = tiling_of(p, math, window, strips, width, 0, limit);
    if (rest > 0) {
      int const last_limit = even_boxes ? std::min(limit, tilings[0].bytes) : limit;
      tilings[1] = tiling_of(p, math, window, 1, rest, strips * width * kQuad, last_limit);
    }
    double cost = 0.0;
    bool fits = true;
    for (Tiling const& t : tilings) {
      if (t.strips == 0) continue;
      fits = fits && t.tiles > 0;
      // What stages a tile weighs about a fifth of what multiplies it, at twice the tile's size; in
      // strict fp32, where a product is three, a fifteenth.
      double const columns = t.lines * (t.columns + kLineColumns);
      cost += t.slice_tiles() * (1.0 + staging * columns / (kTileQuads * kQuad));
    }
    if (!fits || (best > 0.0 && cost >= best)) continue;
    best = cost;
    s.tilings = tilings;
  }
  if (best == 0.0) return best;
  s.slice_tiles = 0;
  int largest = 0;
  for (Tiling const& t : s.tilings) {
    s.slice_tiles += t.slice_tiles();
    largest = std::max(largest, t.bytes);
  }
  s.box_bytes = int(round_up(largest, 128));  // boxes begin where copies may land
  return best;
}

// Fits rings and filter into what shared memory has. Fewer stages make room for larger boxes, where
// those are worth it. Returns what lay_out() does, and more for each stage that is missing.
double fit(Schedule& s, ConvProblem const& p, Math math, Window const& window, int64_t shared) {
  int64_t const consumers = consumers_of(math);
  int64_t const left = shared - kHeaderBytes -
                       consumers * 4 * kMomentFloats * int64_t(sizeof(float)) -
                       (s.streams_filter ? 0 : s.block_filter_bytes());
  int64_t const beside = s.streams_filter ? s.filter_stage_bytes : 0;  // the boxes of a stage
  bool const strict = traits_of(math).parts == 2;
  int const wanted = s.streams_filter && !strict ? kWantedSharedStages : kWantedStages;
  // A consumer waits for its next stage before it releases the one before the present. Where a
  // stage is a single filter row, those must be two different ones.
  bool single = p.r == 1;
  for (BlockSteps const& steps : s.block_steps) single = single || steps.filter_rows == 1;
  int const fewest = kFewestStages + (s.streams_filter && single ? 1 : 0);
  double best = 0.0;
  for (int stages = wanted; stages >= fewest; --stages) {
    int64_t const limit = (left / stages - beside) / consumers / 128 * 128;
    if (limit <= 0) continue;
    int uneven = 0;  // stages
    for (bool const even : {false, true}) {
      Schedule candidate = s;
      double cost = lay_out(candidate, p, math, window, int(limit), even) *
                    (1.0 + kMissingStage * (wanted - stages));
      if (cost == 0.0) continue;
      int64_t const stage = consumers * candidate.box_bytes + beside;
      candidate.stages = int(std::min<int64_t>(kMaxStages, left / stage));
      if (!even) uneven = candidate.stages;
      int const more = std::min(candidate.stages, kDeepRing) - std::min(uneven, kDeepRing);
      if (even) cost *= 1.0 - kMoreStage * more;
      if (best > 0.0 && cost >= best) continue;
      candidate.shared_bytes = int(shared - left + candidate.stages * stage);
      best = cost;
      s = candidate;
    }
  }
  return best;
}

// An even number of filter rows, so that operands alternate between two sets of registers.
int even_iterations(int iterations, int filter_rows) {
  return iterations % 2 == 1 && filter_rows % 2 == 1 ? iterations + 1 : iterations;
}

// Gives phases taps of their own, blocks of one phase each along depth and height.
Support divide_taps(Schedule& s, ConvProblem const& p, Window const& window, Phases const& phases) {
  PhaseBlocks& blocks = s.phase_blocks;
  int const most[] = {p.t, p.r};
  Phases::Axis const* const rows[] = {&phases.d, &phases.h};
  PhaseBlocks::Taps* const taps[] = {blocks.depth, blocks.height};
  int const extents[] = {p.d, p.h};
  for (int axis = 0; axis < 2; ++axis) {
    Phases::Axis const& phase = *rows[axis];
    char const* const name = axis == 0 ? "depth" : "height";
    if (phase.count > kMostRowPhases) {
      return Support::no(detail::join("its stride along ", name, " is ", phase.count, ", up to ",
                                      kMostRowPhases, " is served"));
    }
    Axis const lowered = axis_of(phase, extents[axis]);
    for (int i = 0; i < phase.count; ++i) {
      conv::Phase const found = lowered.phase(i);
      if (found.taps == 0) {
        return Support::no(detail::join("phase ", i, " along ", name, " has no taps"));
      }
      int const lowest = found.shift - (found.taps - 1);
      if (found.taps > kFar || lowest < -kFar || lowest > kFar) {
        return Support::no("its taps reach too far");
      }
      FUSEDCONV_CHECK(found.taps <= most[axis], "sm90_runs: problem: taps along ", name, ": got ",
                      most[axis], ", expected at least the ", found.taps, " of phase ", i);
      taps[axis][i] = {.lowest = int16_t(lowest), .count = int16_t(found.taps)};
    }
  }
  int const count = phases.w.count;
  if (count != 2 && count != 4 && count != 8) {
    return Support::no(
        detail::join("its stride along width is ", count, "; 2, 4 and 8 have halves of phases"));
  }
  Axis const width = axis_of(phases.w, p.w);
  for (int i = 0; i < count; ++i) {
    conv::Phase const found = width.phase(i);
    bool const upper = i >= count / 2;
    int const lowest = found.shift - (found.taps - 1);
    // A product with a tap that is not there would make NaN of what is infinite.
    int const from = upper ? 0 : -window.before, to = upper ? window.after : 0;
    if (found.taps != to - from + 1 || lowest != from) {
      return Support::no(detail::join("phase ", i, " along width reads inputs from ", lowest,
                                      " to ", found.shift, " of a position; from ", from, " to ",
                                      to, " is served"));
    }
  }
  blocks.half_phases = count / 2;
  blocks.channel_blocks = int(ceil_div(p.k / phases.all(), blocks.channels()));
  s.blocks_n = phases.d.count * phases.h.count * blocks.channel_blocks;
  s.k_iterations = 0;
  for (int d = 0; d < phases.d.count; ++d) {
    for (int h = 0; h < phases.h.count; ++h) {
      BlockSteps steps;
      steps.filter_rows = blocks.height[h].count;
      steps.k_iterations = even_iterations(blocks.depth[d].count * s.k_blocks, steps.filter_rows);
      s.k_iterations = std::max(s.k_iterations, steps.k_iterations);
      s.block_steps.push_back(steps);
    }
  }
  return Support::yes();
}

}  // namespace

Schedule schedule_of(ConvProblem const& p, Math math, Window const& window, Phases const* phases,
                     Layout layout, bool aligned, bool padded_lines, Device const& device) {
  if (Support const runs = supports_architecture(device); !runs) return refused(runs.reason);
  if (layout != Layout::kChannelsFirst) return refused("reads NCHW; the input is channels last");
  Window const taken{p.lower_padding_w, p.s - 1 - p.lower_padding_w};
  if (p.s > kMaxWindow || (p.s > 1 && p.dilation_w != 1)) {
    return refused(detail::join("its filter's rows are up to ", kMaxWindow,
                                " neighbouring columns, not ", p.s, " with dilation ",
                                p.dilation_w));
  }
  if (taken != window) {
    return refused(detail::join("reads ", window.before, " columns before and ", window.after,
                                " after an output's, not ", taken.before, " and ", taken.after));
  }
  int const element = traits_of(math).element_bytes();
  if (!aligned || (!padded_lines && int64_t(p.w) * element % 16 != 0)) {
    return refused(detail::join("the input's rows are no multiples of 16 bytes: ", p.w, " times ",
                                element, aligned ? "" : ", or its address is none"));
  }

  Schedule s;
  int const k_block = kKBlockBytes / element;
  s.k_blocks = int(ceil_div(p.c, k_block));
  s.k_iterations = even_iterations(p.t * s.k_blocks, p.r);
  s.blocks_n = int(ceil_div(p.k, kBlockN));
  if (phases != nullptr && window.size() > 1) {
    if (Support const support = divide_taps(s, p, window, *phases); !support) {
      return refused(support.reason);
    }
  }
  s.is_staggered = staggers(window) && p.q % kQuad == kStagger && p.z * p.p % 2 == 0;
  s.filter_stage_bytes = traits_of(math).parts * p.r * p.s * kTapBytes;
  Schedule streamed = s;
  streamed.streams_filter = true;
  double const staying = fit(s, p, math, window, device.shared_bytes);
  double const streaming = fit(streamed, p, math, window, device.shared_bytes);
  if (staying == 0.0 && streaming == 0.0) {
    return refused(detail::join("two stages of its pipeline, with ", s.filter_stage_bytes,
                                " bytes of the filter each, exceed the shared memory of a ",
                                "multiprocessor"));
  }
  if (staying == 0.0 || (streaming > 0.0 && staying > kWorthStaying * streaming)) s = streamed;
  int64_t const tiles = int64_t(p.z) * s.slice_tiles;
  if (tiles >= int64_t(1) << 30) return refused(detail::join("a sample has ", tiles, " tiles"));
  s.tiles = int(tiles);
  s.filter_bytes = (s.block_filter_bytes() + int64_t(sizeof(unsigned))) * s.blocks_n;
  return s;
}

}  // namespace fusedconv::conv::sm90::runs
