#include "conv/sm90/boxes/launch.hpp"

namespace fusedconv::conv::sm90::boxes {

void append_tf32(std::vector<Row>& rows) {
  append_row<Math::kTf32, 256>(rows);
  append_row<Math::kTf32, 192>(rows);
  append_row<Math::kTf32, 128>(rows);
  append_row<Math::kTf32, 64>(rows);
  append_row<Math::kTf32, 256, 2>(rows);
  append_row<Math::kTf32, 128, 2>(rows);
  append_row<Math::kTf32, 256, 4>(rows);
}

}  // namespace fusedconv::conv::sm90::boxes
