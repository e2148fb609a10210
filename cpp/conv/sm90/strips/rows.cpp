#include "conv/sm90/strips/rows.hpp"

#include "conv/collected.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90::strips {

std::vector<Row> const& rows() {
  static std::vector<Row> const all = collected<Row>({&append_f16, &append_bf16});
  return all;
}

Config::Config(Row const& row, ConvProblem const& problem, Layout layout, bool aligned,
               bool padded_lines, Device const& device)
    : row(&row),
      problem(problem),
      multiprocessors(device.multiprocessors),
      line(padded_lines ? round_up(problem.w, kGranule) : problem.w),
      schedule(schedule_of(problem, row.reach, row.math, layout, aligned, padded_lines, device)) {}

}  // namespace fusedconv::conv::sm90::strips
