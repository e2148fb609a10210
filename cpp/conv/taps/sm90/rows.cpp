#include "conv/taps/sm90/rows.hpp"

#include "fusedconv/check.hpp"

namespace fusedconv::conv::taps::sm90 {

std::vector<Row> const& rows() {
  static std::vector<Row> const all = [] {
    std::vector<Row> result;
    append_tf32(result);
    append_tf32x3(result);
    append_f16(result);
    append_bf16(result);
    return result;
  }();
  return all;
}

Config::Config(Row const& row, Problem const& problem, Device const& device)
    : row(&row),
      problem(problem),
      multiprocessors(device.multiprocessors),
      schedule(schedule_of(problem, row.math, row.shape, device)) {}

std::string Config::reads() const { return describe(schedule.loads); }

int64_t Config::partial_slots() const {
  Schedule const& s = schedule;
  return s.sample_tiles() * (s.shares_rows ? kConsumers : 1) * s.axes[0].phases * s.axes[1].phases *
         s.axes[2].phases;
}

int64_t Config::partial_bytes_per_sample() const {
  return partial_slots() * problem.output_channels * problem.groups *
         int64_t(sizeof(CountedPartial));
}

}  // namespace fusedconv::conv::taps::sm90
