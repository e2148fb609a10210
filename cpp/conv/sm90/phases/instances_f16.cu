#include "conv/sm90/phases/launch.hpp"

namespace fusedconv::conv::sm90::phases {

void append_f16(std::vector<Row>& rows) { append_rows<Math::kF16>(rows); }

}  // namespace fusedconv::conv::sm90::phases
