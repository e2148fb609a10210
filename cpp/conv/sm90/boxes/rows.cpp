#include "conv/sm90/boxes/rows.hpp"

#include <algorithm>
#include <bit>

#include "conv/collected.hpp"
#include "conv/filter_source.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90::boxes {

std::vector<Row> const& rows() {
  static std::vector<Row> const all =
      collected<Row>({&append_tf32, &append_f16, &append_bf16, &append_filter_first});
  return all;
}

Config::Config(Row const& row, Problem const& problem, Device const& device, Direction direction)
    : row(&row),
      problem(problem),
      multiprocessors(device.multiprocessors),
      schedule(schedule_of(problem, direction, row.math, row.shape, device)) {}

bool Config::reads_weight(FilterSource const& weight) const {
  // A stride of a tensor map, which an expanded weight has none of.
  auto const whole = [&](int64_t elements) {
    return elements > 0 && elements * traits().element_bytes() % kPieceBytes == 0;
  };
  // Taps are one axis of it.
  if (!taps_follow(weight, weight.tap_stride())) return false;
  if (schedule.direction == Direction::kGathers) {
    return row->shape.columns <= kMostBoxExtent && weight.stride_c == 1 &&
           whole(weight.tap_stride()) && whole(weight.stride_k);
  }
  // Copies of shorter lines take longer than packing does, where each tile has its own.
  int const shortest = row->shape.stationary ? kGranule : kMostLine / 2;
  return schedule.line >= shortest && weight.stride_k == 1 && weight.k % schedule.line == 0 &&
         (weight.taps() == 1 || whole(weight.tap_stride())) && whole(weight.stride_c);
}

int64_t Config::tiles(int64_t batch) const {
  return ceil_div(schedule.slabs(batch).all(), row->shape.slabs());
}

int64_t Config::multiplied() const {
  FUSEDCONV_CHECK(
      row->shape.filter_first(), row->name,
      ": multiplied: got a row whose positions are the first operand, expected one whose "
      "filter is");
  Slabs const slabs = schedule.slabs(1);
  int const whole = slabs.count[1] - 1, left = schedule.axes[1].positions - whole * slabs.box[1];
  int const last = *std::ranges::lower_bound(kProductLines, left);
  int64_t const lines = int64_t(whole) * slabs.box[1] + last;
  return int64_t(slabs.count[0]) * lines * slabs.count[2] * slabs.box[2];
}

bool Config::suits_moments() const {
  if (row->shape.filter_first()) return true;  // its slabs are of one sample each
  int64_t positions = 1;
  for (Axis const& axis : schedule.axes) positions *= axis.positions;
  return 3 * kSlab * schedule.slabs(1).all() <= 4 * positions;
}

int64_t Config::partial_slots() const {
  return schedule.slabs(1).all() * int64_t(schedule.sets.size());
}

bool Config::holds_pixels() const {
  if (row->shape.filter_first()) return false;  // its warps have channels of their own
  int const columns = row->shape.columns, channels = problem.output_channels;
  return schedule.segment == channels && columns % channels == 0 &&
         columns / channels <= kMostPixels && std::has_single_bit(unsigned(columns / channels));
}

}  // namespace fusedconv::conv::sm90::boxes
