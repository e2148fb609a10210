// TF32 rows: float32 tensors, operands rounded to TF32 on their way to shared memory.
#include "conv/sm90_kernel.hpp"

namespace fusedconv::conv::sm90 {

void append_tf32(std::vector<Row>& rows) {
  rows.push_back(row<Math::kTf32, Sharing::kTurns>());
  rows.push_back(row<Math::kTf32, Sharing::kChannels>());
  rows.push_back(row<Math::kTf32, Sharing::kPositions>());
}

}  // namespace fusedconv::conv::sm90
