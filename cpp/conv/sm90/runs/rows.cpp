#include "conv/sm90/runs/rows.hpp"

#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90::runs {

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
