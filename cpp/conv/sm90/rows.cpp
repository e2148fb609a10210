#include "conv/sm90/rows.hpp"

#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90 {

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
