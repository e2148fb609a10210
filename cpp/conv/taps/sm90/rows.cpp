#include "conv/taps/sm90/rows.hpp"

#include <algorithm>
#include "conv/collected.hpp"

#include "fusedconv/check.hpp"

namespace fusedconv::conv::taps::sm90 {

std::vector<Row> const& rows() {
  static std::vector<Row> const all =
      collected<Row>({&append_tf32, &append_tf32x3, &append_f16, &append_bf16});
  return all;
}

Config::Config(Row const& row, Problem const& problem, Device const& device)
    : row(&row),
      problem(problem),
      multiprocessors(device.multiprocessors),
      schedule(schedule_of(problem, row.math, row.shape, device)) {}

std::string Config::reads() const { return describe(schedule.loads); }

bool Config::joins_samples(bool moments) const {
  if (schedule.order != Order::kLine || moments) return false;
  int64_t plane = 1, image = 1;
  for (AxisProblem const& axis : problem.axes) {
    plane *= axis.input;
    image *= axis.output;
  }
  // Offsets from the first sample of a tile are counted in 32 bits.
  int64_t const samples = schedule.tile_columns(row->shape) / std::max<int64_t>(1, plane) + 2;
  int64_t const widest = std::max(problem.output_channels * image, problem.channels * plane);
  return samples * widest * problem.groups <= 0x7fffffff;
}

int64_t Config::tiles(int64_t batch, bool moments) const {
  if (!joins_samples(moments)) return batch * schedule.sample_tiles();
  int64_t pixels = batch;
  for (AxisProblem const& axis : problem.axes) pixels *= axis.input;
  return ceil_div(pixels, schedule.tile_columns(row->shape));
}

int Config::splits() const {
  Schedule const& s = schedule;
  int64_t const items = s.sample_tiles() * s.blocks_m * problem.groups;
  Memory const memory = Memory::of(s.positions, s.pieces, s.stages, s.slots, row->math, row->shape);
  int64_t const sums = int64_t(kConsumers) * row->shape.row_groups * kInstructionRows *
                       row->shape.columns * int64_t(sizeof(float));
  int splits = 1;
  if (!row->shape.splits_channels() || sums > memory.end - memory.boxes) return splits;
  while (splits < kMostSplits && 2 * splits * items <= multiprocessors &&
         s.chunks / (2 * splits) * s.block_taps >= kFewestShare) {
    splits *= 2;
  }
  return splits;
}

int64_t Config::partial_slots() const {
  Schedule const& s = schedule;
  return s.sample_tiles() * (s.shares_rows ? kConsumers : 1) * s.axes[0].phases * s.axes[1].phases *
         s.axes[2].phases;
}

}  // namespace fusedconv::conv::taps::sm90
