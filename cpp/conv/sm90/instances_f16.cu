// float16 rows, fp32 accumulation.
#include "conv/sm90/launch.hpp"

namespace fusedconv::conv::sm90 {

void append_f16(std::vector<Row>& rows) {
  append_rows<Math::kF16, Sharing::kPingPong, Sharing::kCooperativeM, Sharing::kCooperativeN>(rows);
}

}  // namespace fusedconv::conv::sm90
