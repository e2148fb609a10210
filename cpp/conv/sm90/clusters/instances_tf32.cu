#include "conv/sm90/clusters/launch.hpp"

namespace fusedconv::conv::sm90::clusters {

void append_tf32(std::vector<Row>& rows) { append_row<Math::kTf32>(rows); }

}  // namespace fusedconv::conv::sm90::clusters
