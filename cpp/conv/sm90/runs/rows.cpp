#include "conv/sm90/runs/rows.hpp"

#include "conv/collected.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90::runs {

std::vector<Row> const& rows() {
  static std::vector<Row> const all =
      collected<Row>({&append_tf32, &append_tf32x3, &append_f16, &append_bf16});
  return all;
}

Config::Config(Row const& row, ConvProblem const& problem, Phases const& phases, Layout layout,
               bool aligned, bool padded_lines, Device const& device)
    : row(&row),
      problem(problem),
      phases(phases),
      multiprocessors(device.multiprocessors),
      line(padded_lines ? round_up(problem.w, 16 / traits_of(row.math).element_bytes())
                        : problem.w),
      schedule(schedule_of(problem, row.math, row.window, layout, aligned, padded_lines, device)) {
  FUSEDCONV_CHECK(row.interleaves || phases.all() == 1, row.name, ": phases: got ", phases.d, "x",
                  phases.h, "x", phases.w, ", expected 1x1x1");
  FUSEDCONV_CHECK(phases.all() > 0 && problem.k % phases.all() == 0, row.name, ": phases: got ",
                  phases.d, "x", phases.h, "x", phases.w, " of ", problem.k, " output channels");
}

}  // namespace fusedconv::conv::sm90::runs
