#include "conv/sm90/schedule.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "conv/sm90/architecture.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90 {
namespace {

constexpr int64_t kMaxPositions = int64_t(1) << 30;  // positions are 32-bit

// Lays the raster out for a number of strips; what a stage holds follows from the pitch.
void lay_out(Schedule& s, ConvProblem const& p, TileShape const& tile, int strips) {
  int const upper_w = p.q + p.dilation_w * (p.s - 1) - p.w - p.lower_padding_w;
  int const upper_h = p.p + p.dilation_h * (p.r - 1) - p.h - p.lower_padding_h;
  s.strips = strips;
  bool const flat = p.z == 1 && p.d == 1;  // no next slice whose zeros could serve
  s.pitch_h = flat ? p.p + p.dilation_h * (p.r - 1) : p.h + std::max(p.lower_padding_h, upper_h);
  if (strips == 1) {
    s.strip_width = p.q;
    s.pitch_w = std::max(p.w + std::max(p.lower_padding_w, upper_w), 8);
    // 16-bit elements are transposed in pairs of positions.
    if (tile.element_bytes() == 2) s.pitch_w = int(round_up(s.pitch_w, 2));
  } else {
    // Octets of positions do not cross rows.
    int const halo = p.dilation_w * (p.s - 1);
    s.pitch_w = int(round_up(ceil_div(p.q, strips) + halo, 8));
    s.strip_width = s.pitch_w - halo;
    if (s.strip_width % 2 == 1 && p.q % 2 == 0) --s.strip_width;
    s.strips = int(ceil_div(p.q, s.strip_width));
  }
  s.linear = s.strips == 1 && s.pitch_w == p.q && (flat || s.pitch_h == p.p);
}

// Fits the pipeline into shared memory, with a number of filter rows in each stage.
bool fit_pipeline(Schedule& s, ConvProblem const& p, TileShape const& tile, Layout layout,
                  int filter_rows, int64_t shared_limit) {
  int const reach = tile.n() + p.dilation_w * (p.s - 1);
  s.filter_rows_per_stage = filter_rows;
  s.staged_row_pitch = std::min(p.dilation_h * s.pitch_w, reach);
  s.staged_positions = reach + (filter_rows - 1) * s.staged_row_pitch;
  if (s.staged_positions > kMaxStagedPositions) return false;
  // Two lanes that store the halves of a k-block then use different banks.
  s.plane_pitch = s.staged_positions + (12 - s.staged_positions % 8) % 8;
  int const taps = filter_rows * p.s;
  // A stage of few taps takes several k-blocks, so that barriers are passed less often.
  s.k_blocks_per_stage = 1;
  while (taps * s.k_blocks_per_stage * 2 <= 9 && s.k_blocks % (s.k_blocks_per_stage * 2) == 0 &&
         s.staged_positions * s.k_blocks_per_stage * 2 <= kMaxStagedPositions) {
    s.k_blocks_per_stage *= 2;
  }
  s.k_iterations = p.t * (p.r / filter_rows) * (s.k_blocks / s.k_blocks_per_stage);
  s.filter_stage_bytes = tile.parts() * tile.m() * kKBlockBytes * taps * s.k_blocks_per_stage;
  s.input_stage_bytes = tile.parts() * s.plane_pitch * kKBlockBytes * s.k_blocks_per_stage;
  s.filter_bytes = int64_t(s.tiles_m) * s.k_iterations * s.filter_stage_bytes;
  if (s.tma) {
    bool const contiguous = filter_rows == 1 || s.staged_row_pitch == p.dilation_h * s.pitch_w;
    int const multiple = 16 / tile.element_bytes();
    // A box starts at a multiple of 16 bytes, in channels-first rows before the first column.
    int const lead = layout == Layout::kChannelsFirst ? multiple - 1 : 0;
    s.input_row_elements = int(round_up(s.pitch_w + lead, multiple));
    if (!contiguous || s.input_row_elements > kMaxTmaExtent) return false;
    s.input_rows = (s.pitch_w + s.staged_positions - 2) / s.pitch_w + 1;
    s.tma_stage_bytes = s.k_blocks_per_stage * s.input_rows * s.input_row_elements * kKBlockBytes;
  }
  int64_t const fixed = kBarrierBytes + (tile.keeps_filter() ? s.filter_bytes : 0);
  int const stage_bytes = s.input_stage_bytes + (tile.keeps_filter() ? 0 : s.filter_stage_bytes);
  int64_t left = shared_limit - fixed;
  // Two stages to work, then those of TMA against latency, then the rest in turn.
  s.stages = 2;
  s.tma_stages = s.tma ? 2 : 0;
  left -= 2 * int64_t(stage_bytes) + s.tma_stages * int64_t(s.tma_stage_bytes);
  if (left < 0) return false;
  bool grown = true;
  while (grown) {
    grown = false;
    if (s.tma && s.tma_stages < 4 && left >= s.tma_stage_bytes) {
      ++s.tma_stages;
      left -= s.tma_stage_bytes;
      grown = true;
    }
    if (s.stages < kMaxStages && left >= stage_bytes) {
      ++s.stages;
      left -= stage_bytes;
      grown = true;
    }
  }
  s.shared_bytes = int(shared_limit - left);
  return true;
}

Schedule refused(std::string reason) {
  Schedule result;
  result.support = Support::no(std::move(reason));
  return result;
}

}  // namespace

Schedule schedule_of(ConvProblem const& p, TileShape const& tile, Layout layout, bool aligned,
                     Device const& device) {
  if (Support const runs = supports_architecture(device); !runs) return refused(runs.reason);
  Schedule s;
  int const innermost = layout == Layout::kChannelsFirst ? p.w : p.c;
  s.tma = aligned && int64_t(innermost) * tile.element_bytes() % 16 == 0;
  s.block_n = tile.block_n();
  s.k_blocks = int(ceil_div(p.c, tile.k()));
  s.tiles_m = int(ceil_div(p.k, tile.m()));
  if (tile.keeps_filter() && s.tiles_m > 1) {
    return refused(detail::join("its filter stays in shared memory for up to ", kBlockM,
                                " output channels, not ", p.k));
  }
  // Strips shorten the rows between a tile's filter rows, at the price of columns staged twice.
  // Taken is what stages and computes the least; a staged position costs about a seventh of a
  // computed one.
  double best = 0.0;
  bool countable = false;
  Schedule chosen;
  for (int strips = 1; strips <= std::max(1, p.q / 24) && strips <= 64; ++strips) {
    for (int filter_rows : {p.r, 1}) {
      Schedule candidate = s;
      lay_out(candidate, p, tile, strips);
      int64_t const positions =
          (int64_t(p.z - 1) * candidate.pitch_h + p.p - 1) * candidate.pitch_w +
          candidate.strip_width;
      if (positions > kMaxPositions) continue;
      countable = true;
      candidate.positions = int(positions);
      candidate.tiles_n = int(ceil_div(candidate.positions, tile.n()));
      if (!fit_pipeline(candidate, p, tile, layout, filter_rows, device.shared_bytes)) continue;
      double const staged = double(candidate.staged_positions) * (p.r / filter_rows);
      double const computed = double(tile.n());
      double const cost = double(candidate.tiles_n) * candidate.strips * (computed + 0.15 * staged);
      if (chosen.stages == 0 || cost < best) {
        chosen = candidate;
        best = cost;
      }
      if (p.r == 1) break;
    }
  }
  if (!countable) {
    return refused(detail::join("a sample has more than ", kMaxPositions, " positions"));
  }
  if (chosen.stages == 0) {
    return refused("two stages of its pipeline exceed the shared memory of a multiprocessor");
  }
  chosen.warpgroup_tiles = chosen.strips * chosen.tiles_n * (tile.n() / tile.block_n());
  return chosen;
}

}  // namespace fusedconv::conv::sm90
