#include "conv/few/rows.hpp"

#include "conv/few/steps.hpp"
#include "groupnorm/merge_counted.hpp"

namespace fusedconv::conv::few {

std::vector<Row> const& rows() {
  static std::vector<Row> const all{row_tf32(), row_f16(), row_bf16()};
  return all;
}

Config::Config(Row const& row, Problem const& problem, FilterSource const& source,
               Device const& device)
    : row(&row),
      problem(problem),
      source(source),
      schedule(schedule_of(problem, row.math, device)) {
  matching(*this, source);
}

int64_t Config::partial_bytes_per_sample() const {
  return partial_slots() * output_channels_of(problem) * int64_t(sizeof(CountedPartial));
}

void merge_moments(Config const& config, GroupNormProblem const& problem,
                   CountedPartial const* partials, groupnorm::StatisticsTargets const& targets,
                   cudaStream_t stream) {
  groupnorm::merge_counted("few merge_moments", problem, config.partial_slots(), partials, targets,
                           stream);
}

}  // namespace fusedconv::conv::few
