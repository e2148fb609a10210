#include "conv/sm90/boxes/rows.hpp"

#include "conv/collected.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90::boxes {

std::vector<Row> const& rows() {
  static std::vector<Row> const all = collected<Row>({&append_tf32, &append_f16, &append_bf16});
  return all;
}

Config::Config(Row const& row, Problem const& problem, Device const& device)
    : row(&row),
      problem(problem),
      multiprocessors(device.multiprocessors),
      schedule(schedule_of(problem, row.math, row.shape, device)) {}

int64_t Config::tiles(int64_t batch) const {
  return ceil_div(schedule.slabs(batch).all(), kConsumers);
}

}  // namespace fusedconv::conv::sm90::boxes
