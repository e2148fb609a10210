#include "conv/sm90/boxes/rows.hpp"

#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90::boxes {

std::vector<Row> const& rows() {
  static std::vector<Row> const all = [] {
    std::vector<Row> result;
    append_tf32(result);
    append_f16(result);
    append_bf16(result);
    return result;
  }();
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
