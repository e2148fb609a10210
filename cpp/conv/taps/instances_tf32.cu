#include "conv/taps/launch.hpp"

namespace fusedconv::conv::taps {

void append_tf32(std::vector<Row>& rows) { append_rows<Math::kTf32, 2, 4, 8>(rows); }

}  // namespace fusedconv::conv::taps
