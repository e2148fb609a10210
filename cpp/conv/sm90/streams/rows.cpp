#include "conv/sm90/streams/rows.hpp"

namespace fusedconv::conv::sm90::streams {

std::vector<Row> const& rows() {
  static std::vector<Row> const all = [] {
    std::vector<Row> result;
    append_tf32(result);
    return result;
  }();
  return all;
}

Config::Config(Row const& row, TransposedProblem const& problem, Device const& device)
    : row(&row),
      problem(problem),
      multiprocessors(device.multiprocessors),
      schedule(schedule_of(problem, row.shape, row.math, device)) {}

}  // namespace fusedconv::conv::sm90::streams
