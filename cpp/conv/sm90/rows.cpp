#include "conv/sm90/rows.hpp"

#include "conv/collected.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90 {

std::vector<Row> const& rows() {
  static std::vector<Row> const all =
      collected<Row>({&append_tf32, &append_tf32x3, &append_f16, &append_bf16});
  return all;
}

Config::Config(Row const& row, ConvProblem const& problem, Layout layout, bool aligned,
               Device const& device)
    : row(&row),
      problem(problem),
      layout(layout),
      multiprocessors(device.multiprocessors),
      schedule(schedule_of(problem, row.tile, layout, aligned, device)) {}

std::string Config::reads() const {
  std::string result =
      detail::join(name_of(layout), ", ", schedule.tma ? "TMA" : "loads by element");
  if (schedule.strips > 1) result += detail::join(", ", schedule.strips, " strips");
  return result;
}

}  // namespace fusedconv::conv::sm90
