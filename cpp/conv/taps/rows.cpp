#include "conv/taps/rows.hpp"

#include "conv/collected.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::taps {

std::vector<Row> const& rows() {
  static std::vector<Row> const all =
      collected<Row>({&append_tf32, &append_tf32x3, &append_f16, &append_bf16});
  return all;
}

Config::Config(Row const& row, Problem const& problem, Device const& device)
    : row(&row), problem(problem), schedule(schedule_of(problem, row.math, row.groups, device)) {}

std::string Config::reads() const { return describe(schedule.loads); }

int64_t Config::partial_slots() const {
  Schedule const& s = schedule;
  return s.sample_tiles() * s.axes[0].phases * s.axes[1].phases * s.axes[2].phases / s.width_phases;
}

// Declared in launch.hpp, where CUDA's headers are.
unsigned checked_blocks(Arguments const& a) {
  Schedule const& s = a.config.schedule;
  int64_t const blocks = a.batch * s.sample_tiles() * a.config.problem.groups * s.blocks_m;
  constexpr int64_t kMost = 0x7fffffff;
  FUSEDCONV_CHECK(blocks <= kMost, a.config.row->name, ": blocks: got ", blocks,
                  ", expected at most ", kMost);
  return unsigned(blocks);
}

}  // namespace fusedconv::conv::taps
