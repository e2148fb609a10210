#include "conv/direct/rows.hpp"

#include "conv/steps.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::direct {

std::vector<Row> const& rows() {
  static std::vector<Row> const all{row_f32(), row_f16(), row_bf16()};
  return all;
}

Config::Config(Row const& row, Problem const& problem, FilterSource const& source,
               Device const& device)
    : ReadingConfig{&row, problem, source, schedule_of(problem, row.math, device)} {
  matching(*this, source);
}

std::string Config::reads() const {
  if (problem.layout == Layout::kChannelsLast) {
    return schedule.vector > 1 ? "nhwc" : "nhwc, element by element";
  }
  return schedule.run_taps == kGeneral ? "nchw, output by output" : "nchw";
}

// Declared in launch.hpp, where CUDA's headers are.
unsigned checked_blocks(Arguments const& a) {
  Schedule const& s = a.config.schedule;
  int64_t tiles = a.batch * s.sample_tiles() * s.channel_blocks;
  if (a.config.problem.layout == Layout::kChannelsFirst) tiles *= a.config.problem.groups;
  constexpr int64_t kMost = 0x7fffffff - kThreads;
  FUSEDCONV_CHECK(tiles <= kMost, a.config.row->name, ": tiles: got ", tiles, ", expected at most ",
                  kMost);
  return unsigned(ceil_div(tiles, s.teams));
}

}  // namespace fusedconv::conv::direct
