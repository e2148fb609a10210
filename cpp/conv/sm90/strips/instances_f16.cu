#include "conv/sm90/strips/launch.hpp"

namespace fusedconv::conv::sm90::strips {

void append_f16(std::vector<Row>& rows) { append_rows<Math::kF16>(rows); }

}  // namespace fusedconv::conv::sm90::strips
