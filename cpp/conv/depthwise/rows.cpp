#include "conv/depthwise/rows.hpp"

#include "conv/depthwise/steps.hpp"

namespace fusedconv::conv::depthwise {

std::vector<Row> const& rows() {
  static std::vector<Row> const all{row_f32(), row_f16(), row_bf16()};
  return all;
}

Config::Config(Row const& row, Problem const& problem, FilterSource const& source,
               Device const& device)
    : ReadingConfig{&row, problem, source, schedule_of(problem, row.math, device)},
      multiprocessors(device.multiprocessors) {
  matching(*this, source);
}

}  // namespace fusedconv::conv::depthwise
