// Strict float32 rows: 3xTF32, operands split where they are staged.
#include "conv/sm90/launch.hpp"

namespace fusedconv::conv::sm90 {

// Their filter is twice as large: of kPingPong, few would fit.
void append_tf32x3(std::vector<Row>& rows) {
  append_rows<Math::kTf32x3, Sharing::kCooperativeM, Sharing::kCooperativeN>(rows);
}

}  // namespace fusedconv::conv::sm90
