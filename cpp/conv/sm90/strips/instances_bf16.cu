#include "conv/sm90/strips/launch.hpp"

namespace fusedconv::conv::sm90::strips {

void append_bf16(std::vector<Row>& rows) { append_rows<Math::kBF16>(rows); }

}  // namespace fusedconv::conv::sm90::strips
