#include "conv/sm90/wgrad/launch.hpp"

namespace fusedconv::conv::sm90::wgrad {

void append_tf32x3(std::vector<Row>& rows) { append_rows<Math::kTf32x3>(rows); }

}  // namespace fusedconv::conv::sm90::wgrad
