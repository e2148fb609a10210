#include "conv/sm90/boxes/rows.hpp"

#include <bit>

#include "conv/collected.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90::boxes {

std::vector<Row> const& rows() {
  static std::vector<Row> const all = collected<Row>({&append_tf32, &append_f16, &append_bf16});
  return all;
}

Config::Config(Row const& row, Problem const& problem, Device const& device, Direction direction)
    : row(&row),
      problem(problem),
      multiprocessors(device.multiprocessors),
      schedule(schedule_of(problem, direction, row.math, row.shape, device)) {}

int64_t Config::tiles(int64_t batch) const {
  return ceil_div(schedule.slabs(batch).all(), kConsumers);
}

bool Config::holds_pixels() const {
  int const columns = row->shape.columns, channels = problem.output_channels;
  return schedule.segment == channels && columns % channels == 0 &&
         columns / channels <= kMostPixels && std::has_single_bit(unsigned(columns / channels));
}

}  // namespace fusedconv::conv::sm90::boxes
