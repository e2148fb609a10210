// TF32 rows: float32 tensors, operands rounded to TF32 on their way to shared memory.
#include "conv/sm90/launch.hpp"

namespace fusedconv::conv::sm90 {

void append_tf32(std::vector<Row>& rows) {
  append_rows<Math::kTf32, Sharing::kPingPong, Sharing::kCooperativeM, Sharing::kCooperativeN>(
      rows);
}

}  // namespace fusedconv::conv::sm90
