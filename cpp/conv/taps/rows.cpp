#include "conv/taps/rows.hpp"

#include "fusedconv/check.hpp"

namespace fusedconv::conv::taps {

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
      schedule(schedule_of(problem, row.math, row.groups, device)) {}

std::string Config::reads() const { return describe(schedule.loads); }

int64_t Config::partial_slots() const {
  Schedule const& s = schedule;
  return s.sample_tiles() * s.axes[0].phases * s.axes[1].phases * s.axes[2].phases /
         s.width_phases;
}

int64_t Config::partial_bytes_per_sample() const {
  return partial_slots() * problem.output_channels * problem.groups *
         int64_t(sizeof(CountedPartial));
}

// Declared in launch.hpp, where CUDA's headers are.
void check_launch(Arguments const& a, char const* where, cudaError_t status) {
  if (status == cudaSuccess) return;
  Problem const& c = a.config.problem;
  auto const by_axis = [&](int AxisProblem::* field) {
    return detail::join(c.axes[0].*field, "x", c.axes[1].*field, "x", c.axes[2].*field);
  };
  throw KernelFailure(detail::join(
      a.config.row->name, ": ", where, " failed with ", cudaGetErrorName(status), " (",
      cudaGetErrorString(status), ") for N=", a.batch, " C=", c.channels, " K=", c.output_channels,
      " groups=", c.groups, " input=", by_axis(&AxisProblem::input),
      " output=", by_axis(&AxisProblem::output), " kernel=", by_axis(&AxisProblem::kernel),
      " stride=", by_axis(&AxisProblem::stride), ", ", a.config.schedule.shared_bytes,
      " bytes of shared memory"));
}

unsigned checked_blocks(Arguments const& a) {
  Schedule const& s = a.config.schedule;
  int64_t const blocks = a.batch * s.sample_tiles() * a.config.problem.groups * s.blocks_m;
  constexpr int64_t kMost = 0x7fffffff;
  FUSEDCONV_CHECK(blocks <= kMost, a.config.row->name, ": blocks: got ", blocks,
                  ", expected at most ", kMost);
  return unsigned(blocks);
}

}  // namespace fusedconv::conv::taps
