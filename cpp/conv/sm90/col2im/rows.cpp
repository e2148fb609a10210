#include "conv/sm90/col2im/rows.hpp"

#include "conv/steps.hpp"

namespace fusedconv::conv::sm90::col2im {

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

Config::Config(Row const& row, TransposedProblem const& problem, Device const& device)
    : row(&row), problem(problem), schedule(schedule_of(problem, row.shape, row.math, device)) {}

int64_t line_of(FilterSource const& w) {
  return 1 + (w.k - 1) * w.stride_k + (w.t - 1) * w.stride_t + (w.r - 1) * w.stride_r +
         (w.s - 1) * w.stride_s;
}

bool Config::reads_weight(FilterSource const& weight) const {
  int const size = traits().element_bytes();
  return size == 2 && weight.stride_c * size % int(kWeightAlignment) == 0 &&
         weight.stride_c >= line_of(weight) && line_of(weight) <= row->shape.columns;
}

FilterSource packed_source(Config const& config) {
  FilterSource result = weight_of(config.problem);
  result.stride_k = 1;
  result.stride_s = result.k;
  result.stride_r = result.stride_s * result.s;
  result.stride_t = result.stride_r * result.r;
  result.stride_c = config.schedule.columns;
  return result;
}

}  // namespace fusedconv::conv::sm90::col2im
