// bfloat16 rows, fp32 accumulation.
#include "conv/sm90/launch.hpp"

namespace fusedconv::conv::sm90 {

void append_bf16(std::vector<Row>& rows) {
  append_rows<Math::kBF16, Sharing::kPingPong, Sharing::kCooperativeM, Sharing::kCooperativeN>(
      rows);
}

}  // namespace fusedconv::conv::sm90
