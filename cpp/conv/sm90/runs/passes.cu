#include "conv/sm90/runs/passes.hpp"

#include "conv/sm90/passes.hpp"
#include "conv/sm90/runs/tile_parts.hpp"
#include "groupnorm/merge_partials_device.hpp"

namespace fusedconv::conv::sm90::runs {
namespace {

FilterOrder order_of(Config const& config, PhasePlanes const& planes, bool reverses_taps) {
  static_assert(sm90::kBlockM == kBlockN && sm90::kKBlockBytes == kKBlockBytes,
                "blocks of a packed filter");
  ConvProblem const& c = config.problem;
  Schedule const& s = config.schedule;
  return {.math = config.row->math,
          .taps_d = c.t,
          .taps_h = c.r,
          .taps_w = c.s,
          .blocks_m = 1,
          .tiles_m = s.blocks_n,
          .k_blocks = s.k_blocks,
          .k_blocks_per_stage = 1,
          .filter_rows = c.r,
          .k_iterations = s.k_iterations,
          // A lane's channels of 32 bits are neighbours, one of each half.
          .interleaves_halves = config.traits().element_bytes() == 4,
          .zeros = s.blocks_n,
          .phases = config.phases,
          .phase_blocks = s.phase_blocks,
          .before = {c.lower_padding_d, c.lower_padding_h, c.lower_padding_w},
          .planes = planes,
          .reverses_taps = reverses_taps};
}

}  // namespace

void pack_filter(Config const& config, FilterSource const& source, void const* weight, void* filter,
                 cudaStream_t stream) {
  auto const whole = PhasePlanes::whole(int(source.t), int(source.r), int(source.s));
  sm90::pack_filter(order_of(config, whole, true), source, weight, filter, stream);
}

void pack_phases(Config const& config, FilterSource const& source, PhasePlanes const& planes,
                 void const* weight, void* filter, cudaStream_t stream) {
  sm90::pack_filter(order_of(config, planes, false), source, weight, filter, stream);
}

void merge_moments(Config const& config, GroupNormProblem const& problem,
                   TilePartial const* partials, groupnorm::StatisticsTargets const& targets,
                   cudaStream_t stream) {
  GroupNormProblem by_phase = problem;
  by_phase.channels *= config.phases.d.count * config.phases.h.count;
  groupnorm::launch_merge_partials(config.row->name, by_phase, config.schedule.tiles,
                                   TileParts::of(config, partials), targets, stream);
}

}  // namespace fusedconv::conv::sm90::runs
