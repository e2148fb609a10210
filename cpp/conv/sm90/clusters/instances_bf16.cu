#include "conv/sm90/clusters/launch.hpp"

namespace fusedconv::conv::sm90::clusters {

void append_bf16(std::vector<Row>& rows) { append_row<Math::kBF16>(rows); }

}  // namespace fusedconv::conv::sm90::clusters
