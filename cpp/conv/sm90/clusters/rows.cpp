#include "conv/sm90/clusters/rows.hpp"

#include "conv/collected.hpp"
#include "conv/steps.hpp"

namespace fusedconv::conv::sm90::clusters {

std::vector<Row> const& rows() {
  static std::vector<Row> const all =
      collected<Row>({&append_tf32, &append_tf32x3, &append_f16, &append_bf16});
  return all;
}

Config::Config(Row const& row, Problem const& problem, FilterSource const& source, int norm_groups,
               Device const& device)
    : row(&row),
      problem(problem),
      source(source),
      norm_groups(norm_groups),
      schedule(schedule_of(problem, norm_groups > 0 ? problem.output_channels / norm_groups : 0,
                           row.math, device)) {
  matching(*this, source);
}

}  // namespace fusedconv::conv::sm90::clusters
