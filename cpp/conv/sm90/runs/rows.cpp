#include "conv/sm90/runs/rows.hpp"

#include "conv/collected.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90::runs {

std::vector<Row> const& rows() {
  static std::vector<Row> const all =
      collected<Row>({&append_tf32, &append_tf32x3, &append_f16, &append_bf16});
  return all;
}

namespace {

Phases const& checked(Row const& row, ConvProblem const& problem, Phases const& phases) {
  auto const name = [&] {
    return detail::join(phases.d.count, "x", phases.h.count, "x", phases.w.count);
  };
  FUSEDCONV_CHECK(row.interleaves || phases.all() == 1, row.name, ": phases: got ", name(),
                  ", expected 1x1x1");
  FUSEDCONV_CHECK(phases.d.count > 0 && phases.h.count > 0 && phases.w.count > 0 &&
                      problem.k % phases.all() == 0,
                  row.name, ": phases: got ", name(), " of ", problem.k, " output channels");
  return phases;
}

}  // namespace

Config::Config(Row const& row, ConvProblem const& problem, Phases const& phases, Layout layout,
               bool aligned, bool padded_lines, Device const& device)
    : row(&row),
      problem(problem),
      phases(checked(row, problem, phases)),
      multiprocessors(device.multiprocessors),
      line(padded_lines ? round_up(problem.w, 16 / traits_of(row.math).element_bytes())
                        : problem.w),
      schedule(schedule_of(problem, row.math, row.window, row.interleaves ? &phases : nullptr,
                           layout, aligned, padded_lines, device)) {}

}  // namespace fusedconv::conv::sm90::runs
