#include "conv/sm90/wgrad/rows.hpp"

namespace fusedconv::conv::sm90::wgrad {

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

Config::Config(Row const& row, ConvProblem const& problem, Layout layout, Device const& device)
    : row(&row),
      problem(problem),
      schedule(schedule_of(problem, row.math, row.filter_rows, layout, device)) {}

}  // namespace fusedconv::conv::sm90::wgrad
