#include "conv/sm90/clusters/rows.hpp"

#include "conv/collected.hpp"
#include "conv/steps.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90::clusters {

std::vector<Row> const& rows() {
  static std::vector<Row> const all =
      collected<Row>({&append_tf32, &append_tf32x3, &append_f16, &append_bf16});
  return all;
}

namespace {

// 0 where nothing is normalised, or the convolution has groups, which no schedule serves.
int group_channels(Row const& row, Problem const& problem, int groups) {
  if (problem.groups != 1) return 0;
  FUSEDCONV_CHECK(groups >= 0 && (groups == 0 || problem.output_channels % groups == 0), row.name,
                  ": norm_groups: got ", groups, " of ", problem.output_channels, " channels");
  return groups == 0 ? 0 : problem.output_channels / groups;
}

}  // namespace

Config::Config(Row const& row, Problem const& problem, FilterSource const& source, int norm_groups,
               Device const& device)
    : row(&row),
      problem(problem),
      source(source),
      norm_groups(norm_groups),
      schedule(schedule_of(problem, group_channels(row, problem, norm_groups), row.math, device)) {
  matching(*this, source);
}

}  // namespace fusedconv::conv::sm90::clusters
