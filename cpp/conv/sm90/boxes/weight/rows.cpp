#include "conv/sm90/boxes/weight/rows.hpp"

#include "conv/collected.hpp"

namespace fusedconv::conv::sm90::boxes::weight {

std::vector<Row> const& rows() {
  static std::vector<Row> const all = collected<Row>({&append_tf32, &append_f16, &append_bf16});
  return all;
}

Config::Config(Row const& row, Problem const& problem, int64_t batch, Device const& device)
    : row(&row),
      problem(problem),
      batch(batch),
      schedule(schedule_of(problem, batch, row.math, row.block, device)) {}

bool Config::writes(FilterSource const& weight) const {
  auto const in_pairs = [](int64_t extent, int64_t stride) {
    return extent == 1 || stride % 2 == 0;
  };
  return schedule.splits == 1 && schedule.slabs.all() <= kFlushSteps && weight.stride_c == 1 &&
         weight.c % 2 == 0 && in_pairs(weight.k, weight.stride_k) &&
         in_pairs(weight.t, weight.stride_t) && in_pairs(weight.r, weight.stride_r) &&
         in_pairs(weight.s, weight.stride_s);
}

}  // namespace fusedconv::conv::sm90::boxes::weight
