#include "conv/few/rows.hpp"

#include "conv/few/steps.hpp"

namespace fusedconv::conv::few {

std::vector<Row> const& rows() {
  static std::vector<Row> const all{row_tf32(), row_f16(), row_bf16()};
  return all;
}

Config::Config(Row const& row, Problem const& problem, FilterSource const& source,
               Device const& device)
    : ReadingConfig{&row, problem, source, schedule_of(problem, row.math, device)} {
  matching(*this, source);
}

}  // namespace fusedconv::conv::few
