#include "conv/sm90/runs/schedule.hpp"

#include <algorithm>
#include <string>

#include "conv/sm90/schedule.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90::runs {
namespace {

constexpr int kFewestStages = 2;
constexpr int kWantedStages = 3;

Schedule refused(std::string reason) {
  Schedule result;
  result.support = Support::no(std::move(reason));
  return result;
}

// Tiles of `quads` by at most `rows`, of which a stage takes at most `limit` bytes.
Tiling tiling_of(ConvProblem const& p, Math math, Window const& window, int strips, int quads,
                 int rows, int column0, int limit) {
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
  // quads at once read different banks. Narrow tiles are few.
  if (t.columns / unit % 2 == 0 && quads > 2) t.columns += unit;
  int const halo = p.dilation_h * (p.r - 1);
  t.rows = std::min(rows, p.p);
  auto const bytes = [&] { return (t.rows + halo) * k_block * t.columns * element; };
  while (t.rows > 1 && (bytes() > limit || t.rows + halo > kMaxTmaExtent)) --t.rows;
  t.lines = t.rows + halo;
  t.bytes = bytes();
  t.tiles = int(ceil_div(p.p, t.rows));
  return t;
}

}  // namespace

Schedule schedule_of(ConvProblem const& p, Math math, Window const& window, Layout layout,
                     bool aligned, Device const& device) {
  if (device.architecture != kArchitecture) {
    return refused(detail::join("runs on compute capability ", kArchitecture / 10, ".",
                                kArchitecture % 10, ", the device has ", device.architecture / 10,
                                ".", device.architecture % 10));
  }
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
  if (!aligned || int64_t(p.w) * element % 16 != 0) {
    return refused(detail::join("the input's rows are no multiples of 16 bytes: ", p.w, " times ",
                                element, aligned ? "" : ", or its address is none"));
  }

  Schedule s;
  int const k_block = kKBlockBytes / element;
  s.k_blocks = int(ceil_div(p.c, k_block));
  // An even number of filter rows, so that operands alternate between two sets of registers.
  s.k_iterations = p.t * s.k_blocks;
  if (s.k_iterations % 2 == 1 && p.r % 2 == 1) ++s.k_iterations;
  s.blocks_n = int(ceil_div(p.k, kBlockN));
  int64_t const block_filter_bytes = int64_t(s.k_iterations) * p.r * p.s * kTapBytes;
  int64_t const fixed = kHeaderBytes + block_filter_bytes +
                        int64_t(kConsumers) * 4 * kMomentFloats * int64_t(sizeof(float));
  int64_t const left = (device.shared_bytes - fixed) / kConsumers;
  // Slots begin where copies may land.
  auto const slot = [](int64_t bytes) { return bytes / 128 * 128; };
  int const limit = int(std::max<int64_t>(0, slot(left / kWantedStages)));
  if (limit < 2048) {
    return refused(detail::join("the filter of ", kBlockN, " output channels, ", block_filter_bytes,
                                " bytes, leaves the stages of its pipeline ",
                                "too little shared memory"));
  }
  int const quads = int(ceil_div(p.q, kQuad));
  int const strips = p.q / (kStripQuads * kQuad);
  int const rest = quads - strips * kStripQuads;
  if (strips > 0) {
    s.tilings[0] =
        tiling_of(p, math, window, strips, kStripQuads, kTileQuads / kStripQuads, 0, limit);
  }
  if (rest > 0) {
    // At least as many bytes as the wide tiles take are there.
    s.tilings[1] =
        tiling_of(p, math, window, 1, rest, kTileQuads / rest, strips * kStripQuads * kQuad, limit);
  }
  int largest = 0;
  for (Tiling const& t : s.tilings) {
    if (t.bytes > limit) {
      return refused(detail::join("a stage of ", t.bytes, " bytes exceeds its share of the shared ",
                                  "memory, ", limit));
    }
    s.slice_tiles += t.slice_tiles();
    largest = std::max(largest, t.bytes);
  }
  int64_t const tiles = int64_t(p.z) * s.slice_tiles;
  if (tiles >= int64_t(1) << 30) return refused(detail::join("a sample has ", tiles, " tiles"));
  s.tiles = int(tiles);
  s.stage_bytes = int(round_up(largest, 128));
  s.stages = int(std::min<int64_t>(kMaxStages, left / s.stage_bytes));
  if (s.stages < kFewestStages) {
    return refused("two stages of its pipeline exceed the shared memory of a multiprocessor");
  }
  s.block_filter_bytes = int(block_filter_bytes);
  s.filter_bytes = (block_filter_bytes + int64_t(sizeof(unsigned))) * s.blocks_n;
  s.shared_bytes = int(fixed) + kConsumers * s.stages * s.stage_bytes;
  return s;
}

}  // namespace fusedconv::conv::sm90::runs
