#include "conv/taps/sm90/launch.hpp"

namespace fusedconv::conv::taps::sm90 {

void append_f16(std::vector<Row>& rows) {
  append_row<Math::kF16, 1, 256>(rows);
  append_row<Math::kF16, 2, 128>(rows);
  append_row<Math::kF16, 1, 64>(rows);
}

}  // namespace fusedconv::conv::taps::sm90
