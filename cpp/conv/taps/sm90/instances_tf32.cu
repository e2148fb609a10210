#include "conv/taps/sm90/launch.hpp"

namespace fusedconv::conv::taps::sm90 {

void append_tf32(std::vector<Row>& rows) {
  append_row<Math::kTf32, 1, 256>(rows);
  append_row<Math::kTf32, 2, 128>(rows);
  append_row<Math::kTf32, 1, 64>(rows);
}

}  // namespace fusedconv::conv::taps::sm90
