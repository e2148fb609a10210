#include "conv/sm90/boxes/launch.hpp"

namespace fusedconv::conv::sm90::boxes {

void append_f16(std::vector<Row>& rows) {
  append_row<Math::kF16, 256>(rows);
  append_row<Math::kF16, 192>(rows);
  append_row<Math::kF16, 128>(rows);
  append_row<Math::kF16, 64>(rows);
  append_row<Math::kF16, 256, 2>(rows);
  append_row<Math::kF16, 128, 2>(rows);
  append_row<Math::kF16, 256, 4>(rows);
  append_row<Math::kF16, 256, 8>(rows);
  append_row<Math::kF16, 256, 2, true>(rows);
  append_row<Math::kF16, 128, 2, true>(rows);
  append_row<Math::kF16, 256, 4, true>(rows);
}

}  // namespace fusedconv::conv::sm90::boxes
