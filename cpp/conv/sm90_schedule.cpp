#include <algorithm>

#include "conv/sm90.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90 {
namespace {

constexpr int kBarrierBytes = 1024;
constexpr int64_t kLargestLine = int64_t(1) << 30;  // positions are 32-bit

// Lays the line out for strips of a width; the stage's rows follow from the pitch.
void lay_out(Schedule& s, ConvProblem const& p, Math math, int strips) {
  int const upper_w = p.q + p.dilation_w * (p.s - 1) - p.w - p.lower_padding_w;
  int const upper_h = p.p + p.dilation_h * (p.r - 1) - p.h - p.lower_padding_h;
  s.strips = strips;
  bool const flat = p.z == 1 && p.d == 1;  // no next slice whose zeros could serve
  s.pitch_h = flat ? p.p + p.dilation_h * (p.r - 1) : p.h + std::max(p.lower_padding_h, upper_h);
  if (strips == 1) {
    s.strip_width = p.q;
    s.pitch_w = std::max(p.w + std::max(p.lower_padding_w, upper_w), 8);
    // 16-bit elements are turned in pairs of positions.
    if (element_bytes(math) == 2) s.pitch_w = int(round_up(s.pitch_w, 2));
  } else {
    // Groups of eight positions do not cross rows.
    int const halo = p.dilation_w * (p.s - 1);
    s.pitch_w = int(round_up(ceil_div(p.q, strips) + halo, 8));
    s.strip_width = s.pitch_w - halo;
    if (s.strip_width % 2 == 1 && p.q % 2 == 0) --s.strip_width;
    s.strips = int(ceil_div(p.q, s.strip_width));
  }
  s.linear = s.strips == 1 && s.pitch_w == p.q && (flat || s.pitch_h == p.p);
}

bool fit_stage(Schedule& s, ConvProblem const& p, Math math, Sharing sharing, Layout layout,
               int rows, int shared_limit) {
  int const parts = parts_of(math);
  int const tile = tile_positions(math, sharing);
  int const reach = tile + p.dilation_w * (p.s - 1);
  s.rows_per_stage = rows;
  s.row_step = std::min(p.dilation_h * s.pitch_w, reach);
  s.stage_rows = reach + (rows - 1) * s.row_step;
  if (s.stage_rows > kMaxStageRows) return false;
  // Two lanes that store the halves of a chunk then use different banks.
  s.plane_rows = s.stage_rows + (12 - s.stage_rows % 8) % 8;
  int const taps = rows * p.s;
  // A stage of few taps takes several chunks, so that barriers are passed less often.
  s.chunks_per_stage = 1;
  while (taps * s.chunks_per_stage * 2 <= 9 && s.chunks % (s.chunks_per_stage * 2) == 0 &&
         s.stage_rows * s.chunks_per_stage * 2 <= kMaxStageRows) {
    s.chunks_per_stage *= 2;
  }
  s.stages = p.t * (p.r / rows) * (s.chunks / s.chunks_per_stage);
  s.filter_stage_bytes =
      parts * blocks_m(sharing) * kBlockM * kChunkBytes * taps * s.chunks_per_stage;
  s.input_stage_bytes = parts * s.plane_rows * kChunkBytes * s.chunks_per_stage;
  s.filter_bytes = int64_t(s.blocks_k) * s.stages * s.filter_stage_bytes;
  if (s.bulk) {
    bool const contiguous = rows == 1 || s.row_step == p.dilation_h * s.pitch_w;
    int const multiple = 16 / element_bytes(math);
    // A copy starts at a multiple of 16 bytes, in channels-first lines before the first column.
    int const lead = layout == Layout::kChannelsFirst ? multiple - 1 : 0;
    s.line_elements = int(round_up(s.pitch_w + lead, multiple));
    if (!contiguous || s.line_elements > kMaxLineElements) return false;
    s.lines = (s.pitch_w + s.stage_rows - 2) / s.pitch_w + 1;
    s.landing_bytes = s.chunks_per_stage * s.lines * s.line_elements * kChunkBytes;
  }
  bool const resident = sharing == Sharing::kTurns;
  int64_t const fixed = kBarrierBytes + (resident ? s.filter_bytes : 0);
  int const slot = s.input_stage_bytes + (resident ? 0 : s.filter_stage_bytes);
  int64_t left = shared_limit - fixed;
  // Two slots to work, then landing slots against latency, then the rest in turn.
  s.slots = 2;
  s.landing_slots = s.bulk ? 2 : 0;
  left -= 2 * int64_t(slot) + s.landing_slots * int64_t(s.landing_bytes);
  if (left < 0) return false;
  bool grown = true;
  while (grown) {
    grown = false;
    if (s.bulk && s.landing_slots < 4 && left >= s.landing_bytes) {
      ++s.landing_slots;
      left -= s.landing_bytes;
      grown = true;
    }
    if (s.slots < kMaxSlots && left >= slot) {
      ++s.slots;
      left -= slot;
      grown = true;
    }
  }
  s.shared_bytes = int(shared_limit - left);
  return true;
}

}  // namespace

Schedule schedule_of(ConvProblem const& p, Math math, Sharing sharing, Layout layout, bool aligned,
                     int shared_limit) {
  Schedule s;
  int const innermost = layout == Layout::kChannelsFirst ? p.w : p.c;
  bool const bulk = aligned && innermost * element_bytes(math) % 16 == 0;
  int const tile = tile_positions(math, sharing);
  s.block_n = block_n(math);
  s.chunks = int(ceil_div(p.c, chunk_channels(math)));
  s.blocks_k = int(ceil_div(p.k, kBlockM * blocks_m(sharing)));
  if (sharing == Sharing::kTurns && s.blocks_k > 1) {
    s.obstacle = detail::join("its filter stays in shared memory for up to ", kBlockM,
                              " output channels, not ", p.k);
    return s;
  }
  // Strips shorten the rows between a tile's filter rows, at the price of columns staged twice. Taken is
  // what stages and computes the least; a staged position costs about a seventh of a computed one.
  double best = 0.0;
  Schedule chosen;
  for (int strips = 1; strips <= std::max(1, p.q / 24) && strips <= 64; ++strips) {
    for (int rows : {p.r, 1}) {
      Schedule candidate = s;
      candidate.bulk = bulk;
      lay_out(candidate, p, math, strips);
      int64_t const line = (int64_t(p.z - 1) * candidate.pitch_h + p.p - 1) * candidate.pitch_w +
                           candidate.strip_width;
      if (line > kLargestLine) continue;
      candidate.positions = int(line);
      candidate.tiles = int(ceil_div(candidate.positions, tile));
      if (!fit_stage(candidate, p, math, sharing, layout, rows, shared_limit)) continue;
      double const staged = double(candidate.stage_rows) * (p.r / rows);
      double const computed = double(tile);
      double const cost = double(candidate.tiles) * candidate.strips * (computed + 0.15 * staged);
      if (chosen.stages == 0 || cost < best) {
        chosen = candidate;
        best = cost;
      }
      if (p.r == 1) break;
    }
  }
  if (chosen.stages == 0) {
    s.obstacle = "two stages of its pipeline exceed the shared memory of a multiprocessor";
    return s;
  }
  chosen.stat_tiles = chosen.strips * chosen.tiles * (tile / s.block_n);
  return chosen;
}

std::vector<Row> const& rows() {
  static std::vector<Row> const all = [] {
    std::vector<Row> result;
    append_tf32(result);
    append_tf32x3(result);
    append_f16(result);
    append_bf16(result);
    return result;
  }();
  return all;
}

}  // namespace fusedconv::conv::sm90
