#include "conv/taps/launch.hpp"

namespace fusedconv::conv::taps {

void append_tf32x3(std::vector<Row>& rows) { append_rows<Math::kTf32x3, 2, 4, 8>(rows); }

}  // namespace fusedconv::conv::taps
