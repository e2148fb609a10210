// Strict float32 rows: 3xTF32, operands split where they are staged.
#include "conv/sm90_kernel.hpp"

namespace fusedconv::conv::sm90 {

// Their filter is twice as large: of kTurns, few would fit.
void append_tf32x3(std::vector<Row>& rows) {
  rows.push_back(row<Math::kTf32x3, Sharing::kChannels>());
  rows.push_back(row<Math::kTf32x3, Sharing::kPositions>());
}

}  // namespace fusedconv::conv::sm90
