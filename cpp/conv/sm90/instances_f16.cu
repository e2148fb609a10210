// float16 rows, fp32 accumulation.
#include "conv/sm90_kernel.hpp"

namespace fusedconv::conv::sm90 {

void append_f16(std::vector<Row>& rows) {
  rows.push_back(row<Math::kF16, Sharing::kTurns>());
  rows.push_back(row<Math::kF16, Sharing::kChannels>());
  rows.push_back(row<Math::kF16, Sharing::kPositions>());
}

}  // namespace fusedconv::conv::sm90
