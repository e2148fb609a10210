#include "conv/sm90/wgrad/rows.hpp"

#include "conv/collected.hpp"

namespace fusedconv::conv::sm90::wgrad {

std::vector<Row> const& rows() {
  static std::vector<Row> const all =
      collected<Row>({&append_tf32, &append_tf32x3, &append_f16, &append_bf16});
  return all;
}

Config::Config(Row const& row, ConvProblem const& problem, Layout layout, Device const& device)
    : row(&row),
      problem(problem),
      schedule(schedule_of(problem, row.math, row.filter_rows, layout, device)) {}

}  // namespace fusedconv::conv::sm90::wgrad
