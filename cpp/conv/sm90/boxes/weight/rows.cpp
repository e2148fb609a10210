#include "conv/sm90/boxes/weight/rows.hpp"

#include "conv/collected.hpp"
#include "conv/filter_source.hpp"

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
  return schedule.splits == 1 && schedule.slabs.all() * row->block.additions() <= kFlushAdditions &&
         weight.stride_c == 1 && weight.c % kPair == 0 && lines_begin_at(weight, kPair);
}

}  // namespace fusedconv::conv::sm90::boxes::weight
