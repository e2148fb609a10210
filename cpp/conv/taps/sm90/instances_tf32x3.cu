#include "conv/taps/sm90/launch.hpp"

namespace fusedconv::conv::taps::sm90 {

void append_tf32x3(std::vector<Row>& rows) {
  append_row<Math::kTf32x3, 1, 128>(rows);
  append_row<Math::kTf32x3, 1, 64>(rows);
}

}  // namespace fusedconv::conv::taps::sm90
