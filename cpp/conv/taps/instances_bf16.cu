#include "conv/taps/launch.hpp"

namespace fusedconv::conv::taps {

void append_bf16(std::vector<Row>& rows) { append_rows<Math::kBF16, 2, 4, 8>(rows); }

}  // namespace fusedconv::conv::taps
